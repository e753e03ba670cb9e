"""A run in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ..accounting import PARTS
from .logs import Run, Series


def summarize(run: Run) -> dict[str, Any]:
    """Figures of a run by name; None where the logs do not tell. Bytes and seconds are those of rank 0.

    Means are over the steps that were written, which `monitor.interval` thins out.
    """
    sent, dense = run.get("Comm/inter_node_bytes"), run.get("Comm/dense_bytes")
    exchanges, skipped = _last(run.get("Comm/exchanges")), _last(run.get("Comm/skipped"))
    loss = run.loss()
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": None if exchanges is None or skipped is None else int(exchanges + skipped),
        "skipped": None if skipped is None else int(skipped),
        "loss": _last(loss),
        "wall_seconds": max((run.seconds(series)[-1] for series in run.series.values() if series.clock), default=None),
        "inter_node_bytes": _mean(sent),
        "inter_node_bytes_last": _last(sent),
        "intra_node_bytes": _mean(run.get("Comm/intra_node_bytes")),
        "dense_bytes": _mean(dense),
        "dense_over_wire": sum(dense.values) / sum(sent.values) if sum(sent.values) else None,
        "dense_over_wire_last": _last(run.get("Comm/dense_over_wire")),
        "gb_saved": _last(run.get("Comm/gb_saved")),
        "density_asked": _last(run.get("Comm/density_asked")),
        "density": _last(run.get("Comm/density")),
        "residual_over_gradient": _last(run.get("Comm/residual_over_gradient")),
        "seconds": _mean(run.get("Comm/seconds")),
        **{f"{part}_seconds": _mean(run.get(f"Comm/{part}_seconds")) for part in PARTS},
    }


def _last(series: Series) -> float | None:
    return _number(series.values[-1]) if series.values else None


def _mean(series: Series) -> float | None:
    return _number(fmean(series.values)) if series.values else None


def _number(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


ROWS = {  # key -> what it is called, and how it is written
    "steps": ("optimizer steps", "{:,}"),
    "skipped": ("of them skipped", "{:,}"),
    "loss": ("last loss", "{:.4f}"),
    "wall_seconds": ("seconds of the run, from its first log entry", "{:.1f}"),
    "inter_node_bytes": ("bytes across nodes, a step", "{:,.0f}"),
    "inter_node_bytes_last": ("bytes across nodes, last step", "{:,.0f}"),
    "intra_node_bytes": ("bytes inside the node, a step", "{:,.0f}"),
    "dense_bytes": ("bytes if dense, a step", "{:,.0f}"),
    "dense_over_wire": ("dense/wire, whole run", "{:.1f}x"),
    "dense_over_wire_last": ("dense/wire, last step", "{:.1f}x"),
    "gb_saved": ("GB saved", "{:.4g}"),
    "density_asked": ("density asked, last step", "{:.4g}"),
    "density": ("density sent, last step", "{:.4g}"),
    "residual_over_gradient": ("residual over gradient, last step", "{:.3g}"),
    "seconds": ("seconds of an exchange", "{:.4f}"),
    **{f"{part}_seconds": (f"  {part}", "{:.4f}") for part in PARTS},
}


def table(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of text, runs side by side, without what no run has: what it is, then a cell a run."""
    return [
        [label, *("-" if one[key] is None else form.format(one[key]) for one in summaries)]
        for key, (label, form) in ROWS.items()
        if any(one[key] is not None for one in summaries)
    ]
