"""Says before a run what it will cost: measured speeds, one cost model (`costs.py`), predictions for any cluster."""

from __future__ import annotations

from .prediction import METHODS, Job, Row, best_row, dense_row, exchange_cost, predict, ready_section
from .probe import run_probe
from .simulation import CURVES, Point, simulate
from .speeds import ProbeError, Speeds

__all__ = [
    "CURVES", "METHODS", "Job", "Point", "ProbeError", "Row", "Speeds", "best_row", "dense_row", "exchange_cost",
    "predict", "ready_section", "run_probe", "simulate",
]  # fmt: skip
