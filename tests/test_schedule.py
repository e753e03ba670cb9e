"""How many entries are sent at which step."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.config import ScheduleSettings
from ds_sparse.schedule import DensitySchedule, entries


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


@pytest.mark.parametrize(
    "density, numel, k",
    [
        (0.01, 100, 1),
        (0.01, 101, 2),  # rounded up: a density of at least 1 % was asked for
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in binary: no fourth entry for that
        (0.07, 100, 7),  # 7.000000000000001 likewise
        (0.29, 100, 29),  # and 28.999999999999996 is no 28
        (1e-9, 10, 1),  # never none
        (1.0, 1, 1),
        (1.0, 2**31 - 1, 2**31 - 1),
        (0.01, 2**31 - 1, 21_474_837),
    ],
)
def test_entries_of_a_density(density: float, numel: int, k: int) -> None:
    assert entries(density, numel) == k


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9999), st.integers(1, 10**9))
def test_entries_are_the_exact_ceiling_for_densities_as_people_write_them(ten_thousandths: int, numel: int) -> None:
    density = ten_thousandths / 10_000
    exact = -(-Fraction(ten_thousandths, 10_000) * numel // 1)
    assert entries(density, numel) == exact


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-12, 1.0), st.floats(1e-12, 1.0), st.integers(1, 2**31 - 1))
def test_entries_stay_in_range_and_grow_with_the_density(one: float, other: float, numel: int) -> None:
    few, many = entries(min(one, other), numel), entries(max(one, other), numel)
    assert 1 <= few <= many <= numel
