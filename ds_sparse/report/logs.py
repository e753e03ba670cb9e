"""Scalars out of the files that DeepSpeed's TensorBoard and CSV monitors leave behind."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

EVENTS = "*tfevents*"
GROUPS = ("Train_Samples", "CommDensity", "Comm")  # the CSV monitor writes _ where a tag has /
LOSS = "Train/Samples/train_loss"


@dataclass(frozen=True)
class Series:
    """Points of one tag, in the order of `samples`; `clock` is seconds since the epoch, empty where nobody noted it."""

    samples: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """What one folder holds: a series for each tag."""

    name: str
    folder: Path
    series: dict[str, Series]

    def get(self, tag: str) -> Series:
        """The series of a tag; an empty one where there is none."""
        return self.series.get(tag, Series())

    def loss(self) -> Series:
        """Of training, as DeepSpeed names it; else of what else is called a loss, the one with the most points."""
        if LOSS in self.series:
            return self.series[LOSS]
        losses = [series for tag, series in self.series.items() if tag.lower().endswith("loss")]
        return max(losses, key=lambda series: len(series.values), default=Series())

    def seconds(self, series: Series) -> list[float]:
        """Seconds from the first point of any tag of this run to each of the series; empty where nobody noted it."""
        begun = min((other.clock[0] for other in self.series.values() if other.clock), default=0.0)
        return [moment - begun for moment in series.clock]


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """A run for every folder, at any depth, that holds scalars; a folder that is given twice is read once."""
    found: dict[Path, Run] = {}
    for root in folders:
        for folder in sorted({root, *(path.parent for path in _files(root))}):
            series = _from_csv(folder) | _from_events(folder)
            if series:
                name = root.resolve().name if folder == root else folder.relative_to(root).as_posix()
                found.setdefault(folder.resolve(), Run(name, folder, series))
    names = [run.name for run in found.values()]
    return [replace(run, name=run.name if names.count(run.name) == 1 else str(run.folder)) for run in found.values()]


def _files(root: Path) -> list[Path]:
    return [*root.rglob(EVENTS), *root.rglob("*.csv")]


def _from_events(folder: Path) -> dict[str, Series]:
    if not any(folder.glob(EVENTS)):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})  # 0: all of them
    events.Reload()
    series = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        columns = [p.step for p in points], [p.value for p in points], [p.wall_time for p in points]
        series[tag] = Series(*columns)
    return series


def _from_csv(folder: Path) -> dict[str, Series]:
    found = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        if not rows or len(rows[0]) != 2 or rows[0][0] != "step":
            continue  # some other table
        # A resumed run writes a second head; one that is under way may be in the middle of a line.
        points = [(float(row[0]), float(row[1])) for row in rows if len(row) == 2 and row[0] != "step" and row[1]]
        found[_tag(path.stem)] = Series([x for x, _ in points], [value for _, value in points])
    return found


def _tag(stem: str) -> str:
    for group in GROUPS:
        if stem.startswith(f"{group}_"):
            return f"{group.replace('_', '/')}/{stem[len(group) + 1 :]}"
    return stem
