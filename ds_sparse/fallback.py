"""Fallback: sends compressed or dense, whichever was measured to be faster.

The way in use is tried against the other one: during a trial every tenth step goes the other way, all steps are timed,
and at the end all ranks agree on the times, by one all-reduce of two numbers. Where a trial starts and which of its
steps go the other way follows from what was agreed before, so that all ranks decide alike at every step.

    step        0 ... 100 .... 110 .... 120 .... 130 .... 140 .... 150
    compressed  ccccccccc cccccccccccccccccccccccccccccccccccccccccc
    dense                        d        d        d        d       d  agree

A dense step sends everything, what was held back included; nothing is lost by trying it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Seconds = Callable[[], float]  # read late, so that nobody waits for a GPU before a trial has ended
Agree = Callable[[tuple[float, float]], tuple[float, float]]


@dataclass(frozen=True)
class Pace:
    """When trials are made and what decides them. Steps are those that could be compressed at the final density.

    Attributes:
        first: steps before the first trial.
        spacing, samples: a trial is `samples` steps the other way, one in every `spacing`.
        margin: a trial is won with less than this share of the time of the way in use ...
        wins: ... and the way is changed after so many won trials in succession.
        interval: steps at least from a lost trial to the next one, and so many that
        share: the time that trials lose is less than this share of all time spent communicating.
    """

    first: int = 100
    spacing: int = 10
    samples: int = 5
    margin: float = 0.95
    wins: int = 2
    interval: int = 500
    share: float = 0.01


PACE = Pace()


class Change(NamedTuple):
    """Of the way in use; the times are the medians of a step of the trial that decided, averaged over all ranks."""

    to_dense: bool
    compressed_seconds: float
    dense_seconds: float


class Fallback:
    """Decides for each step which way it goes. Pure logic: clocks and the network are the caller's.

    Args:
        agree: what all ranks hold of (compressed, dense) seconds, the same on each of them. Called at a trial's end.

    Attributes:
        dense: whether dense is the way in use.
    """

    def __init__(self, agree: Agree, pace: Pace | None = None) -> None:
        self._agree, self._pace = agree, pace or PACE
        self.dense = False
        self._step, self._start, self._won = 0, self._pace.first, 0
        self._times: dict[bool, list[Seconds]] = {False: [], True: []}

    @property
    def next_is_dense(self) -> bool:
        """Whether the next step has to send everything."""
        return self.dense != self._is_sample()

    def _is_sample(self) -> bool:
        place = self._step - self._start
        return place >= 0 and place % self._pace.spacing == self._pace.spacing - 1

    def record(self, seconds: Seconds) -> Change | None:
        """To be called after each step with the time it took; the change, where this was the step that decided."""
        if self._step >= self._start:
            self._times[self.next_is_dense].append(seconds)
        self._step += 1
        if self._step < self._start + self._pace.samples * self._pace.spacing:
            return None
        times, self._times = self._times, {False: [], True: []}
        # A run resumed in the middle of a trial has few of the times, or none of one kind: the next trial decides.
        if all(len(times[dense]) > 1 for dense in times):
            return self._decide(*self._agree((_median(times[False]), _median(times[True]))))
        self._wait(0)
        return None

    def _decide(self, compressed: float, dense: float) -> Change | None:
        used, other = (dense, compressed) if self.dense else (compressed, dense)
        if other >= self._pace.margin * used:
            self._won = 0
            excess = max(0.0, other / used - 1.0) if used else 0.0
            self._wait(max(self._pace.interval, round(self._pace.samples * excess / self._pace.share)))
            return None
        self._won += 1
        if self._won < self._pace.wins:
            self._wait(0)
            return None
        self.dense, self._won = not self.dense, 0
        self._wait(self._pace.interval)
        return Change(self.dense, compressed, dense)

    def _wait(self, steps: int) -> None:
        self._start = self._step + steps

    def counters(self) -> dict[str, float]:
        """What a resumed run needs to go the same way as this one until the end of the trial under way."""
        return {
            "fallback_dense": self.dense,
            "fallback_step": self._step,
            "fallback_start": self._start,
            "fallback_won": self._won,
        }

    def load_counters(self, counters: dict[str, float]) -> None:
        """Takes up where `counters` were read; without them, anew."""
        self.dense = bool(counters.get("fallback_dense", False))
        self._step, self._won = (int(counters.get(f"fallback_{name}", 0)) for name in ("step", "won"))
        self._start = int(counters.get("fallback_start", self._pace.first))
        self._times = {False: [], True: []}


def _median(times: list[Seconds]) -> float:
    return statistics.median(seconds() for seconds in times)


class Stopwatch:
    """Runs from its making until `stop`, on a GPU by the clock of its current stream, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin = self._now()

    def stop(self) -> Seconds:
        """The time that it ran; on a GPU, whoever reads it waits for the work in between."""
        begin, end = self._begin, self._now()
        if not self._cuda:
            return lambda: float(end - begin)

        def read() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3

        return read

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
