"""How dense the traffic is at each step."""

from __future__ import annotations

from .config import ScheduleSettings


class DensitySchedule:
    """The listed densities in turn, then the final one.

    Steps are those that were exchanged: a step skipped for a non-finite gradient does not count.
    """

    def __init__(self, settings: ScheduleSettings, final: float) -> None:
        self._settings, self.final = settings, final

    def density(self, step: int) -> float:
        """The density of step `step` (from 0), counted from the first compressed one."""
        stages = self._settings.densities
        stage = step // self._settings.steps_per_density if stages else 0
        return stages[stage] if stage < len(stages) else self.final


def entries(density: float, numel: int) -> int:
    """k for `numel` entries: at least one, at most all; rounded up, so that the density asked for is reached."""
    return min(numel, max(1, -(-round(density * numel * 1e6) // 1_000_000)))
