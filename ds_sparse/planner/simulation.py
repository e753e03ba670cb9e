"""The cost model carried on to clusters that are not at hand: time and bytes against the number of nodes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .prediction import DEEPSPEED_ALONE, DENSE, Job, Row, predict
from .speeds import Speeds

# curve -> method and exchange of its rows
CURVES = {
    "dense ring (DeepSpeed alone)": (DEEPSPEED_ALONE, "ring"),
    "two-level dense": (DENSE, DENSE),
    "all_gather": ("sparse_gradient", "all_gather"),
    "reduce_scatter": ("sparse_gradient", "reduce_scatter"),
}


class Point(NamedTuple):
    """Of one curve at a number of nodes; `sent_bytes` across nodes, by each rank and step."""

    curve: str
    nodes: int
    seconds: float
    sent_bytes: int


def simulate(job: Job, speeds: Speeds, density: float, value_dtype: str) -> list[Point]:
    """All curves at 2, 4, 8 ... nodes, up to those of `job` in any case."""
    sizes = [1 << power for power in range(1, job.nodes.bit_length()) if 1 << power < job.nodes]
    return [
        Point(curve, nodes, row.seconds, row.sent_bytes)
        for nodes in [*sizes, job.nodes]
        for curve, row in _rows(replace(job, nodes=nodes), speeds, density, value_dtype).items()
    ]


def _rows(job: Job, speeds: Speeds, density: float, value_dtype: str) -> dict[str, Row]:
    rows = predict(job, speeds, methods=["sparse_gradient"], densities=[density])
    dense = (DEEPSPEED_ALONE, DENSE)
    found = {(row.method, row.exchange): row for row in rows if row.method in dense or row.value_dtype == value_dtype}
    return {curve: found[key] for curve, key in CURVES.items()}


def write_csv(points: Sequence[Point], path: Path) -> None:
    """A line for each point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)


def write_plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Two panels, seconds and bytes against nodes. Needs matplotlib, of the extra `plots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws files only: no display is needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for curve in CURVES:
        line = [point for point in points if point.curve == curve]
        nodes, style = [point.nodes for point in line], ":" if "dense" in curve else "-"
        panels[0].plot(nodes, [point.seconds for point in line], style, marker="o", label=curve)
        panels[1].plot(nodes, [point.sent_bytes / 1e6 for point in line], style, marker="o", label=curve)
    for panel, what in zip(panels, ("seconds of communication a step", "MB a rank sends across nodes"), strict=True):
        panel.set(xlabel="nodes", ylabel=what, yscale="log")
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
