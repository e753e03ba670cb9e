"""How many entries are sent at which step, and when `sparse_momentum` starts to compress."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ds_sparse.config import ScheduleSettings, SparseMomentumSettings
from ds_sparse.methods.sparse_momentum import FreezeRule
from ds_sparse.schedule import DensitySchedule

# ---- densities --------------------------------------------------------------------------------------------------


def test_without_stages_the_final_density_holds_from_the_first_step() -> None:
    schedule = DensitySchedule(ScheduleSettings(), final=0.01)
    assert [schedule.density(step) for step in (0, 1, 10**6)] == [0.01] * 3


def test_each_stage_lasts_its_steps_and_the_final_density_follows() -> None:
    stages = ScheduleSettings(densities=(0.25, 0.05), steps_per_density=3)
    schedule = DensitySchedule(stages, final=0.01)
    assert [schedule.density(step) for step in range(8)] == [0.25] * 3 + [0.05] * 3 + [0.01] * 2


def test_dense_steps_do_not_shift_the_stages() -> None:
    """Steps are counted from the first compressed one, so the schedule itself knows nothing of the dense ones."""
    stages = ScheduleSettings(dense_steps=5, densities=(0.25,), steps_per_density=1)
    assert [DensitySchedule(stages, final=0.01).density(step) for step in (0, 1)] == [0.25, 0.01]


def test_all_densities_are_known_beforehand() -> None:
    """An exchange is chosen for each of them, before training starts."""
    stages = ScheduleSettings(densities=(0.25, 0.05), steps_per_density=3)
    schedule = DensitySchedule(stages, final=0.01)
    assert schedule.densities == (0.25, 0.05, 0.01)
    assert {schedule.density(step) for step in range(10)} == set(schedule.densities)
    assert DensitySchedule(ScheduleSettings(), final=0.01).densities == (0.01,)


# ---- when to freeze ---------------------------------------------------------------------------------------------


class Rule:
    """A `FreezeRule` over an Adam and a node that only exist here: norms and rates by look, in turn."""

    def __init__(self, norms: list[float], rates: list[float] | None = None, beta2: float = 0.9, **given: Any) -> None:
        self.looks = 0
        self.norms, self.rates = norms, rates or [1.0] * len(norms)
        self.others = [0.0] * len(norms)  # what the other ranks add to the norm
        context: Any = SimpleNamespace(adam=self)
        self.betas = (0.9, beta2)
        self._rule = FreezeRule(SparseMomentumSettings(**given), context)

    def variance_norm(self) -> float:
        self.looks += 1
        return self.norms[self.looks - 1] + self.others[self.looks - 1]

    @property
    def lr(self) -> float:
        return self.rates[self.looks - 1]

    def fires_at(self, steps: int) -> list[int]:
        return [step for step in range(steps) if self._rule.due(step)]


def test_a_given_step_is_obeyed_and_the_variance_not_even_looked_at() -> None:
    rule = Rule([], freeze_step=3)
    assert rule.fires_at(6) == [3, 4, 5] and rule.looks == 0


@pytest.mark.parametrize("beta2, every", [(0.9, 10), (0.95, 20), (0.99, 100), (0.999, 1000)])
def test_the_variance_is_looked_at_every_so_many_steps(beta2: float, every: int) -> None:
    rule = Rule([1.0, 1.0], beta2=beta2)
    assert rule.fires_at(2 * every) == []  # one look has nothing to compare with
    assert rule.looks == 1
    assert rule._rule.due(2 * every)


@pytest.mark.parametrize(
    "change, fires", [(1.0, True), (0.97, True), (1.03, True), (0.95, False), (1.05, False), (2.0, False), (0.0, False)]
)
def test_it_fires_when_the_variance_changes_by_less_than_the_given_factor(change: float, fires: bool) -> None:
    assert Rule([7.0, 7.0 * change], stability=0.96).fires_at(21) == ([20] if fires else [])


def test_it_compares_with_the_last_look_not_with_the_first() -> None:
    assert Rule([1.0, 2.0, 4.0, 4.1]).fires_at(41) == [40]


@pytest.mark.parametrize(
    "rates, fires", [([1.0, 1.0], True), ([1.0, 0.5], True), ([0.5, 1.0], False), ([1.0, 1.0 + 1e-6], False)]
)
def test_it_does_not_fire_while_the_learning_rate_rises(rates: list[float], fires: bool) -> None:
    assert Rule([1.0, 1.0], rates).fires_at(21) == ([20] if fires else [])


@pytest.mark.parametrize("norms", [[0.0, 0.0], [0.0, 1.0], [math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf]])
def test_it_does_not_fire_on_a_variance_that_says_nothing(norms: list[float]) -> None:
    assert Rule(norms).fires_at(21) == []


def test_one_unstable_rank_of_the_node_is_enough_to_wait() -> None:
    rule = Rule([1.0, 1.0, 1.0])
    rule.others = [5.0, 50.0, 51.0]  # the norm is that of the node, not of this shard
    assert rule.fires_at(31) == [30]
