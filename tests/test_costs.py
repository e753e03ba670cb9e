"""What the cost model predicts: by hand, and that every byte, round and entry counts. Choices: test_exchange.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.config import LinkSettings
from ds_sparse.costs import GUESS, Constants, Cost, dense_bytes, dense_cost

LINK = LinkSettings(gbit_per_second=8.0, latency_us=50.0)  # 1 GB/s


def test_seconds_by_hand() -> None:
    assert Cost(sent=2_000_000, rounds=0).seconds(LINK, 1) == pytest.approx(2e-3)
    assert Cost(sent=2_000_000, rounds=6).seconds(LINK, 1) == pytest.approx(2e-3 + 6 * 50e-6)
    assert Cost(sent=2_000_000, rounds=6).seconds(LINK, 4) == pytest.approx(8e-3 + 6 * 50e-6)  # 4 share the link
    work = Cost(0, 0, selected=10**9, summed=10**8).seconds(LINK, 4)
    assert work == pytest.approx(1e9 * GUESS.select + 1e8 * GUESS.sum)
    measured = Cost(0, 0, selected=10**9, summed=10**8, encoded=10**7).seconds(LINK, 4, Constants(1e-9, 1e-8, 1e-7))
    assert measured == pytest.approx(1.0 + 10.0 + 0.1)
    uneven = Cost(4_000_000, 0, gathered=2_000_000, dealt=1_000_000)
    assert uneven.seconds(LINK, 1) == pytest.approx(4e-3)
    assert uneven.seconds(LINK, 1, Constants(gather=1.5, deal=2.0)) == pytest.approx(1e-3 + 1.5 * 2e-3 + 2.0 * 1e-3)
    assert Cost(0, 0).seconds(LINK, 1) == 0.0


counts = st.integers(0, 2**40)


@settings(deadline=None, max_examples=100)
@given(st.builds(Cost, *[counts] * 7), st.sampled_from(Cost._fields), st.integers(1, 64))
def test_more_of_anything_takes_longer(cost: Cost, field: str, ranks_per_node: int) -> None:
    more = cost._replace(**{field: 2 * getattr(cost, field) + 2**30})
    given = Constants(1e-10, 1e-9, 1e-8, gather=1.5, deal=2.0)
    assert more.seconds(LINK, ranks_per_node, given) > cost.seconds(LINK, ranks_per_node, given)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 2**40), st.integers(1, 1000), st.integers(1, 64), st.floats(0.01, 400.0), st.floats(0.0, 1e4))
def test_a_worse_link_takes_longer(sent: int, rounds: int, ranks: int, rate: float, latency: float) -> None:
    cost, link = Cost(sent, rounds), LinkSettings(gbit_per_second=rate, latency_us=latency)
    base = cost.seconds(link, ranks)
    assert cost.seconds(link.model_copy(update={"gbit_per_second": rate / 2}), ranks) > base
    assert cost.seconds(link.model_copy(update={"latency_us": 2 * latency + 1e3}), ranks) > base
    assert cost.seconds(link, 2 * ranks) > base


@pytest.mark.parametrize("peers, rounds", [(1, 0), (2, 2), (4, 6), (16, 30)])
def test_a_dense_ring_goes_around_twice(peers: int, rounds: int) -> None:
    assert dense_cost(1000, peers) == Cost(dense_bytes(1000, peers), rounds)
