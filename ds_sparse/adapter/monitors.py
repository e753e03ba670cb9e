"""Writes what level 2 does through DeepSpeed's monitors."""

from __future__ import annotations

from typing import Any

from ..level2 import Level2
from ..monitor import LAYOUT, THRESHOLDS, density_events, events, selected
from .handle import CompressedCommunication


class Monitors:
    """Scalars to every monitor; to TensorBoard, which has them, also a page of charts and histograms.

    Rank 0 writes, of itself: of its shard, and what it sent.
    """

    def __init__(self, engine: Any, handle: CompressedCommunication, level2: Level2) -> None:
        self._engine, self._handle, self._level2 = engine, handle, level2
        self._settings = handle.config.monitor
        self._on = self._settings.enabled and engine.monitor.enabled and engine.global_rank == 0
        self._writer = engine.monitor.tb_monitor.summary_writer if self._on and engine.monitor.tb_monitor else None
        if self._writer is not None:
            self._writer.add_custom_scalars(LAYOUT)

    def before_step(self) -> None:
        """Has the selection of the step that comes looked at, if that is due."""
        feedback = self._level2.method.feedback
        if feedback is not None:
            feedback.selections = [] if self._due(self._settings.histogram_interval, 1) else None

    def after_step(self) -> None:
        """To be called after an optimizer step."""
        monitor, samples = self._engine.monitor, self._engine.global_samples
        if self._due(self._settings.interval):
            handle = self._handle
            monitor.write_events(events(handle.stats, handle.residual_norm(), handle.grad_norm(), samples))
        feedback = self._level2.method.feedback
        if feedback is None or not feedback.selections:  # not due, or nothing was selected: a dense or a skipped step
            return
        found = selected(self._level2.layout, feedback.selections)
        monitor.write_events(density_events(found, samples))
        if self._writer is not None:
            self._writer.add_histogram(THRESHOLDS, found.thresholds(), samples)

    def _due(self, interval: int, ahead: int = 0) -> bool:
        return self._on and interval > 0 and (self._engine.global_steps + ahead) % interval == 0
