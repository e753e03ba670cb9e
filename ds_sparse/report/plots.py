"""Pictures of runs, side by side. Needs matplotlib, of the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, so that no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, StrMethodFormatter

from ..accounting import PARTS
from .logs import Run
from .summary import summarize


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG, and frees the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """A PNG in `folder` for each of PICTURES that the runs have data for."""
    drawn = []
    for name, picture in PICTURES.items():
        figure = picture(runs)
        if figure is not None:
            drawn.append(folder / f"{name}.png")
            save(figure, drawn[-1])
    return drawn


def _bytes(runs: Sequence[Run]) -> Figure | None:
    tags = {"Comm/inter_node_bytes": ("across nodes", "-"), "Comm/dense_bytes": ("if dense", ":")}
    return _lines(runs, tags, "what rank 0 sends at a step", "bytes", EngFormatter("B"))


def _density(runs: Sequence[Run]) -> Figure | None:
    tags = {"Comm/density": ("sent", "-"), "Comm/density_asked": ("asked", ":")}
    return _lines(runs, tags, "density of a step", "share of the entries", StrMethodFormatter("{x:g}"))


def _lines(
    runs: Sequence[Run], tags: Mapping[str, tuple[str, str]], title: str, label: str, ticks: Formatter
) -> Figure | None:
    """A colour a run, a line style a tag, over samples, on a logarithmic axis; zeros (skipped steps) are left out."""
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for colour, run in enumerate(runs):
        for tag, (what, style) in tags.items():
            series = run.get(tag)
            points = [pair for pair in zip(series.samples, series.values, strict=True) if pair[1] > 0]
            if points:
                axis.plot(*zip(*points, strict=True), color=f"C{colour}", ls=style, label=f"{run.name}, {what}")
    if not axis.lines:
        plt.close(figure)
        return None
    axis.set(title=title, xlabel="samples", ylabel=label, yscale="log")
    axis.yaxis.set_major_formatter(ticks)
    _finish(axis)
    return figure


def _time(runs: Sequence[Run]) -> Figure | None:
    """A bar a run, the parts of a mean exchange stacked."""
    found = {run.name: summary for run in runs if (summary := summarize(run))["seconds"] is not None}
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.6 * len(found)))
    left = [0.0] * len(found)
    for part in PARTS:
        widths = [1e3 * (one[f"{part}_seconds"] or 0.0) for one in found.values()]
        axis.barh(list(found), widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axis.annotate(f"{total:.3g} ms", (total, row), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set(title="time of an exchange on rank 0, mean", xlabel="milliseconds", xlim=(0, 1.15 * max(left) or 1.0))
    axis.invert_yaxis()  # the first run on top
    _finish(axis)
    return figure


def _loss(runs: Sequence[Run]) -> Figure | None:
    """Over samples; and over time, where the logs have it."""
    found = [(run, run.loss()) for run in runs]
    timed = any(series.clock for _, series in found)
    if not any(series.values for _, series in found):
        return None
    figure, axes = plt.subplots(1, 1 + timed, figsize=(9 if timed else 6, 4.5), squeeze=False, sharey=True)
    for colour, (run, series) in enumerate(found):
        style = {"color": f"C{colour}", "marker": ".", "label": run.name}
        axes[0][0].plot(series.samples, series.values, **style)
        if series.clock:
            axes[0][1].plot(run.seconds(series), series.values, **style)
    axes[0][0].set(title="loss over samples", xlabel="samples", ylabel="loss")
    if timed:
        axes[0][1].set(title="loss over time", xlabel="seconds since the first log entry")
        axes[0][0].grid(alpha=0.3)
    _finish(axes[0][-1])
    return figure


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")


PICTURES: dict[str, Callable[[Sequence[Run]], Figure | None]] = {
    "bytes": _bytes,
    "time": _time,
    "density": _density,
    "loss": _loss,
}
