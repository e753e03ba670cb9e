"""Links: collectives that count what they send, on one to four forked ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse.accounting import CommStats, StepStats
from ds_sparse.errors import WireError
from ds_sparse.links import Flight, Link, LinkError, waiting_for
from tests.ranks import run_ranks

NUMEL = 14  # no multiple of 3 or 4: a count that rounds wrongly shows


def _part(sender: int, receiver: int) -> torch.Tensor:
    """Of uneven length: 5 for the rank itself, nothing for the next one, more for those before."""
    return torch.arange(5 * ((sender - receiver + 1) % 4), dtype=torch.uint8) + 10 * sender + receiver


def _exchange() -> dict[str, Any]:
    """Every collective over all ranks; what came out, and how many bytes each counted."""
    stats = CommStats()
    link = Link(dist.group.WORLD, "inter", stats)
    generator = torch.Generator().manual_seed(link.rank)
    scattered = torch.arange(12.0) + 100 * link.rank
    calls = {
        # Not representable sums: every order of additions rounds differently.
        "sum": lambda: link.sum_(torch.randn(NUMEL, generator=generator)),
        "gather": lambda: link.gather(torch.arange(5, dtype=torch.uint8) + 10 * link.rank),
        "gather strided": lambda: link.gather((torch.arange(10) + 100 * link.rank)[::2]),
        "sum_scatter": lambda: link.sum_scatter(scattered.clone()),
        "empty sum": lambda: link.sum_(torch.zeros(0)),
        "empty gather": lambda: link.gather(torch.zeros(0)),
        "deal": lambda: torch.cat(_dealt(link)),
        "empty deal": lambda: torch.cat(link.deal([torch.zeros(0)] * link.size, [0] * link.size)),
        "in the background": lambda: torch.cat([flight.wait().flatten() for flight in _started(link)]),
    }
    results: dict[str, Any] = {"place": (link.rank, link.size)}
    for name, call in calls.items():
        before = stats._open.inter_node_bytes
        out = call()
        results[name] = out.tolist(), stats._open.inter_node_bytes - before
    results["intra"] = stats._open.intra_node_bytes
    return results


def _dealt(link: Link) -> list[torch.Tensor]:
    sent = [_part(link.rank, other) for other in range(link.size)]
    dealt = link.deal(sent, [_part(other, link.rank).numel() for other in range(link.size)])
    assert [part.tolist() for part in dealt] == [_part(other, link.rank).tolist() for other in range(link.size)]
    return dealt


def _started(link: Link) -> list[Flight]:
    """Three at once, of which the first is waited for while the others are under way."""
    return [
        link.start_sum_(torch.arange(3) + link.rank),
        link.start_gather(torch.arange(2) + 10 * link.rank),
        link.start_sum_(torch.ones(2, dtype=torch.int64)),
    ]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def exchanged(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, _exchange)


def test_a_link_knows_its_place(exchanged: list[dict[str, Any]]) -> None:
    assert [result["place"] for result in exchanged] == [(rank, len(exchanged)) for rank in range(len(exchanged))]


def test_a_sum_is_the_sum_and_the_same_bits_on_every_rank(exchanged: list[dict[str, Any]]) -> None:
    sums = [result["sum"][0] for result in exchanged]
    assert all(other == sums[0] for other in sums)
    parts = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(len(exchanged))]
    # At most three additions of numbers below 4: each rounds by up to 8 * 2^-24 in sums below 16.
    torch.testing.assert_close(torch.tensor(sums[0]), torch.stack(parts).sum(0), rtol=0, atol=3 * 8 * 2.0**-24)


def test_a_gather_has_one_row_for_each_rank_in_order(exchanged: list[dict[str, Any]]) -> None:
    expected = [[10 * rank + i for i in range(5)] for rank in range(len(exchanged))]
    assert all(result["gather"][0] == expected for result in exchanged)


def test_a_gather_takes_what_is_not_contiguous(exchanged: list[dict[str, Any]]) -> None:
    expected = [[100 * rank + 2 * i for i in range(5)] for rank in range(len(exchanged))]
    assert all(result["gather strided"][0] == expected for result in exchanged)


def test_a_sum_scatter_leaves_each_rank_its_own_part_of_the_sum(exchanged: list[dict[str, Any]]) -> None:
    world = len(exchanged)
    total = [world * i + 100 * sum(range(world)) for i in range(12)]
    assert [x for result in exchanged for x in result["sum_scatter"][0]] == total


def test_a_deal_brings_each_rank_what_the_others_had_for_it(exchanged: list[dict[str, Any]]) -> None:
    """In the order of the ranks; parts are of any length, and some are empty."""
    world = len(exchanged)
    for rank, result in enumerate(exchanged):
        assert result["deal"][0] == torch.cat([_part(sender, rank) for sender in range(world)]).tolist()
    assert {_part(sender, 0).numel() for sender in range(4)} == {0, 5, 10, 15}


def test_collectives_in_the_background_do_not_mix(exchanged: list[dict[str, Any]]) -> None:
    world = len(exchanged)
    summed = [world * i + sum(range(world)) for i in range(3)]
    gathered = [10 * rank + i for rank in range(world) for i in range(2)]
    assert all(result["in the background"][0] == [*summed, *gathered, world, world] for result in exchanged)


def test_nothing_may_be_sent(exchanged: list[dict[str, Any]]) -> None:
    world = len(exchanged)
    for result in exchanged:
        assert result["empty sum"] == ([], 0) and result["empty deal"] == ([], 0)
        assert result["empty gather"] == ([[]] * world, 0)


def test_bytes_are_those_of_the_ring_algorithms(exchanged: list[dict[str, Any]]) -> None:
    """Sent by one rank of m: 2 (m-1)/m of an all-reduce, (m-1) messages of a gather, (m-1)/m of a scatter.

    A deal sends each part once, and keeps this rank's own.
    """
    m = len(exchanged)
    expected = {
        "sum": {1: 0, 2: 56, 3: 74, 4: 84}[m],  # 14 fp32: 56 bytes
        "gather": (m - 1) * 5,
        "gather strided": (m - 1) * 5 * 8,
        "sum_scatter": {1: 0, 2: 24, 3: 32, 4: 36}[m],  # 12 fp32: 48 bytes
        # 3 and 2 int64 summed, 2 int64 gathered: 24, 16 and 16 bytes
        "in the background": {1: 0, 2: 24 + 16 + 16, 3: 32 + 21 + 32, 4: 36 + 24 + 48}[m],
    }
    for result in exchanged:
        assert {name: result[name][1] for name in expected} == expected
        assert result["intra"] == 0
    # A rank has 5 bytes for itself, none for the next one, 15 for the one after that, 10 for the one before.
    assert [result["deal"][1] for result in exchanged] == {1: [0], 2: [0, 10], 3: [15, 10, 25], 4: [25] * 4}[m]


def _both_kinds() -> tuple[StepStats, StepStats]:
    stats = CommStats()
    node, peers = Link(dist.group.WORLD, "intra", stats), Link(dist.group.WORLD, "inter", stats)
    node.sum_(torch.zeros(4))
    peers.gather(torch.zeros(3))
    stats.close(exchanged=True, dense_bytes=48, seconds=0.5, density=0.1)
    peers.gather(torch.zeros(1))
    stats.close(exchanged=False, dense_bytes=0, seconds=0.25, density=0.1)
    return stats.last, stats.total


def test_links_count_into_their_own_column_and_each_step_starts_at_zero() -> None:
    for last, total in run_ranks(2, _both_kinds):
        assert (last.intra_node_bytes, last.inter_node_bytes) == (0, 4)
        assert (total.intra_node_bytes, total.inter_node_bytes) == (16, 16)
        assert (last.exchanges, last.skipped, total.exchanges, total.skipped) == (0, 1, 1, 1)
        assert (total.seconds, total.dense_bytes, total.dense_over_wire) == (0.75, 48, 3.0)


def test_a_link_of_one_rank_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_sparse.links.dist", SimpleNamespace(get_world_size=lambda _: 1, get_rank=lambda _: 0))
    stats = CommStats()
    link, vector = Link(None, "inter", stats), torch.arange(3.0)
    assert link.sum_(vector) is vector and link.sum_scatter(vector) is vector
    assert link.gather(vector).tolist() == [[0.0, 1.0, 2.0]]
    assert link.start_sum_(vector).wait() is vector
    assert link.start_gather(vector).wait().tolist() == [[0.0, 1.0, 2.0]]
    (dealt,) = link.deal([vector], [3])
    assert dealt is vector
    assert stats._open == StepStats()


# ---- when others are gone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), dist.DistBackendError("NCCL")],
)
def test_an_error_of_the_backend_names_who_did_not_answer(error: RuntimeError) -> None:
    said = r"^got no answer from rank 3 after 0\.0 s: "
    with pytest.raises(LinkError, match=said) as caught, waiting_for(lambda: "rank 3"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), WireError("gloo"), ValueError("gloo")])
def test_any_other_error_is_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, waiting_for(lambda: "rank 3"):
        raise error
    assert caught.value is error
