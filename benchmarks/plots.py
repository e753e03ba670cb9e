"""Pictures of what the benchmarks measured. Needs matplotlib, of the `plots` extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ds_sparse.report.plots import save

SHAPED = {"mbit": 1.0, "gbit": 1000.0}


def megabits(rate: str) -> float:
    """Of a rate in tc's words."""
    for unit, factor in SHAPED.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"rate must be a number with mbit or gbit behind it, got {rate!r}")


def time_against_bandwidth(cases: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]], path: Path) -> None:
    """One panel a layout, one line a row; `cases` is layout -> rate -> row -> figures with `seconds`."""
    figure, axes = plt.subplots(1, len(cases), figsize=(7 * len(cases), 5), squeeze=False, sharey=True)
    for axis, (layout, rates) in zip(axes[0], cases.items(), strict=True):
        shaped = sorted((rate for rate in rates if rate != "unshaped"), key=megabits)
        places = [megabits(rate) for rate in shaped]
        for color, row in enumerate(rates[shaped[0]]):
            line, style = [rates[rate][row]["seconds"] for rate in shaped], "-" if "ours" in row else ":"
            axis.plot(places, line, marker="o", ls=style, color=plt.cm.tab20(color % 20), label=row)
        axis.set(xscale="log", yscale="log", xlabel="Mbit/s of a host's link", title=f"{layout} hosts x ranks")
        axis.set_xticks(places, labels=[f"{place:g}" for place in places])
        axis.minorticks_off()
        axis.set_yticks([0.1, 1.0, 10.0], labels=["0.1", "1", "10"])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds to average the gradients")
    axes[0][-1].legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")
    save(figure, path)


def loss_against_time(curves: Mapping[str, Sequence[Any]], path: Path) -> None:
    """One line a peer; each point has `seconds` and `loss`."""
    figure, axis = plt.subplots(figsize=(9, 5))
    for name, points in curves.items():
        line = ([point.seconds for point in points], [point.loss for point in points])
        axis.plot(*line, label=name, ls="-" if "ours" in name else ":")
    axis.set(xlabel="seconds of training", ylabel="validation loss")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    save(figure, path)
