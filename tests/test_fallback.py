"""Fallback: which step goes which way, by clocks that are made up. On ranks: multirank/test_fallback.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat

import pytest
import torch

from ds_sparse.fallback import PACE, Change, Fallback, Stopwatch

PERIOD = PACE.spacing * PACE.samples  # steps of a trial
Times = tuple[float, float]  # (compressed, dense) seconds of a step


def alone(seconds: Times) -> Times:
    """What one rank agrees on with itself."""
    return seconds


def play(fallback: Fallback, times: Iterable[Times]) -> tuple[list[bool], dict[int, Change]]:
    """Which steps were dense, and the changes by the step that decided them."""
    ways, changes = [], {}
    for step, pair in enumerate(times):
        ways.append(fallback.next_is_dense)
        change = fallback.record(lambda seconds=pair[ways[-1]]: seconds)
        if change is not None:
            changes[step] = change
    return ways, changes


def steady(compressed: float, dense: float, steps: int) -> list[Times]:
    return [(compressed, dense)] * steps


def test_what_is_faster_stays() -> None:
    """Five trial steps after a hundred; lost by a factor of two, so that the next ones come 500 steps later."""
    ways, changes = play(Fallback(alone), steady(1.0, 2.0, 690))
    assert not changes
    samples = [109, 119, 129, 139, 149]
    assert [step for step, dense in enumerate(ways) if dense] == samples + [step + 550 for step in samples[:4]]


def test_what_is_slower_is_left_after_two_trials_and_left_for_long() -> None:
    ways, changes = play(Fallback(alone), steady(1.02, 0.95, 900))
    switched = 100 + 2 * PERIOD
    assert changes == {switched - 1: Change(True, 1.02, 0.95)}
    assert not any(ways[:100]) and sum(ways[100:switched]) == 2 * PACE.samples
    others = [step for step in range(switched, 900) if not ways[step]]
    assert others[0] == switched + PACE.interval + PACE.spacing - 1 and len(others) == PACE.samples


def test_it_comes_back_when_that_is_faster() -> None:
    times = chain(steady(2.0, 1.0, 400), repeat((0.5, 1.0), 1000))
    ways, changes = play(Fallback(alone), times)
    to_dense, back = changes
    assert changes[to_dense].to_dense and not changes[back].to_dense
    assert all(ways[to_dense + 1 : to_dense + 1 + PACE.interval]) and not any(ways[back + 1 : back + 300])


def test_one_won_trial_is_not_enough() -> None:
    """A link that is slow for the length of one trial changes nothing; the control stays slow for two."""
    for slow, expected in ((PERIOD, 0), (2 * PERIOD, 1)):
        times = chain(steady(1.0, 2.0, 100), steady(9.0, 2.0, slow), steady(1.0, 2.0, 400))
        assert len(play(Fallback(alone), times)[1]) == expected


def test_single_slow_steps_do_not_count() -> None:
    """Two of a trial's five dense steps and a third of the others may be anything."""
    times = [(1.0 if step % 3 else 50.0, 0.01 if step in (109, 119, 159, 169) else 2.0) for step in range(600)]
    assert not play(Fallback(alone), times)[1]


def test_a_lead_within_the_margin_is_none() -> None:
    assert not play(Fallback(alone), steady(1.0, 0.96, 3000))[1]
    assert len(play(Fallback(alone), steady(1.0, 0.94, 600))[1]) == 1


@pytest.mark.parametrize("slower", [1.0, 1.5, 4.0, 20.0])
@pytest.mark.parametrize("dense_is_slower", [True, False])
def test_trials_cost_less_than_a_hundredth(slower: float, dense_is_slower: bool) -> None:
    """Of the communication time after the first trials, whichever of both is in use."""
    pair = (1.0, slower) if dense_is_slower else (slower, 1.0)
    ways, changes = play(Fallback(alone), steady(*pair, 20_000))
    settled = max(changes, default=0) + 1
    assert len(changes) == (0 if dense_is_slower or slower < 1 / PACE.margin else 1)
    lost = sum(pair[dense] - min(pair) for dense in ways[settled + PERIOD :])
    if changes or dense_is_slower:
        # One trial more than steps were waited for may fall into the time that is looked at.
        assert lost <= PACE.share * (20_000 - settled) + PACE.samples * (slower - 1)


def test_without_anything_to_compare_nothing_changes() -> None:
    """Where no rank compresses, all times are zero."""
    ways, changes = play(Fallback(alone), steady(0.0, 0.0, 2000))
    assert not changes and sum(ways) == 4 * PACE.samples  # at 100, 650, 1200 and 1750


def test_all_decide_by_what_was_agreed() -> None:
    """One rank sees compression win, the other sees it lose: they go the same way. The control agrees on nothing."""

    def run(agree: Callable[[Times], Times]) -> list[list[bool]]:
        return [play(Fallback(agree), steady(*times, 800))[0] for times in ((1.0, 2.0), (9.0, 2.0))]

    one, other = run(lambda seconds: (5.0, 2.0))
    assert one == other and all(one[200:600])
    one, other = run(alone)
    assert one != other


@pytest.mark.parametrize("stop", [50, 120, 150, 175, 230, 400])
def test_a_resumed_run_goes_the_same_way(stop: int) -> None:
    """Also from within a trial: 175 is in the second one, with too few times left to decide by."""
    times = steady(2.0, 1.0, 199)
    whole, _ = play(Fallback(alone), times + steady(2.0, 1.0, 500))
    first, second = Fallback(alone), Fallback(alone)
    before, _ = play(first, times[:stop] if stop <= 199 else steady(2.0, 1.0, stop))
    second.load_counters(first.counters())
    after, _ = play(second, steady(2.0, 1.0, 699 - stop))
    assert before + after == whole


def test_a_trial_cut_off_near_its_end_is_repeated() -> None:
    """At step 145 one dense time is to come: no median of few decides."""
    first, second = Fallback(alone), Fallback(alone)
    play(first, steady(1.0, 2.0, 145))
    second.load_counters(first.counters())
    ways, changes = play(second, [(9.0, 1.0)] * 5 + steady(1.0, 2.0, 60))
    assert not changes and sum(ways[5:55]) == PACE.samples and not any(ways[55:])


def test_without_counters_it_starts_anew() -> None:
    fallback = Fallback(alone)
    play(fallback, steady(2.0, 1.0, 300))
    assert fallback.dense
    fallback.load_counters({"exchanged": 300})
    assert fallback.counters() == Fallback(alone).counters()


def test_a_stopwatch_tells_seconds() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    time.sleep(0.05)
    seconds = stopwatch.stop()
    time.sleep(0.05)
    assert 0.05 <= seconds() == seconds()  # it has stopped: reading it later makes no difference
    assert seconds() < 5.0
