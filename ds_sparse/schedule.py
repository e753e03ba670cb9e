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

    @property
    def densities(self) -> tuple[float, ...]:
        """All there will be, in turn."""
        return (*self._settings.densities, self.final)
