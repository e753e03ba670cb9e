"""Exchanges: the mean of what the peers sent, in peer order, in as many bytes as announced; and which one is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse import ConfigError
from ds_sparse.accounting import CommStats
from ds_sparse.config import ExchangeSettings
from ds_sparse.exchange import AllGatherExchange, DenseExchange, Exchange, choose_exchange, dense_bytes
from ds_sparse.links import Link
from ds_sparse.payload import Payload
from ds_sparse.wire import INDEX_ENCODINGS, Wire
from tests.ranks import run_ranks

N, DENSE_NUMEL = 37, 5  # odd, so that messages need padding
COUNTS = {"one": 1, "some": 9, "all but one": N - 1, "all": N}
EXCHANGES = [*INDEX_ENCODINGS, "smallest", "dense"]

# ---- what each rank sends ---------------------------------------------------------------------------------------


def sent_by(rank: int, k: int, shared: bool) -> tuple[Payload, torch.Tensor]:
    """A payload and excluded entries. Magnitudes span 2^26, so that almost every order of additions differs."""
    generator = torch.Generator().manual_seed(1000 * k + rank)
    chooser = torch.Generator().manual_seed(0) if shared else generator
    indices = torch.randperm(N, generator=chooser)[:k].sort().values.to(torch.int32)
    values = torch.randn(k + DENSE_NUMEL, generator=generator)
    values *= 2.0 ** torch.randint(-13, 14, values.shape, generator=generator)
    return Payload(values[:k], indices, N, shared), values[k:]


def expanded(rank: int, k: int, shared: bool) -> torch.Tensor:
    payload, dense = sent_by(rank, k, shared)
    vector = torch.zeros(N)
    vector[payload.indices.long()] = payload.values
    return torch.cat([vector, dense])


def mean_by_hand(ranks: Any, k: int, shared: bool) -> torch.Tensor:
    """Sum in the order of `ranks`, then one division."""
    total = torch.zeros(N + DENSE_NUMEL)
    for rank in ranks:
        total = total + expanded(rank, k, shared)
    return total / len(ranks)


# ---- on forked ranks --------------------------------------------------------------------------------------------

Case = tuple[str, str, bool]  # exchange, name of k, shared indices
CASES: list[Case] = [(exchange, k, shared) for exchange in EXCHANGES for k in COUNTS for shared in (False, True)]


def build(name: str, link: Link) -> Exchange:
    return DenseExchange(link) if name == "dense" else AllGatherExchange(link, Wire(name))


def _all_cases() -> dict[Case, tuple[torch.Tensor, int, int]]:
    """For every case the mean, the bytes counted, and the bytes announced."""
    results = {}
    for case in CASES:
        name, k, shared = case[0], COUNTS[case[1]], case[2]
        stats = CommStats()
        link = Link(dist.group.WORLD, "inter", stats)
        exchange = build(name, link)
        payload, dense = sent_by(link.rank, k, shared)
        out = torch.full((N + DENSE_NUMEL,), torch.nan)  # whatever stood there must not show through
        exchange.mean_(payload, dense, out)
        announced = exchange.wire_bytes(k, N, DENSE_NUMEL, shared=shared)
        results[case] = out, stats._open.inter_node_bytes, announced
    return results


@pytest.fixture(scope="module", params=[3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[Case, tuple[torch.Tensor, int, int]]]:
    """All cases on one set of ranks: forking costs more than exchanging."""
    return run_ranks(request.param, _all_cases)


def case_id(case: Case) -> str:
    return f"{case[0]}-{case[1]}{'-shared' if case[2] else ''}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_peer_holds_the_same_bits(ranks: list[dict[Case, Any]], case: Case) -> None:
    means = [results[case][0].view(torch.int32) for results in ranks]
    assert all(torch.equal(other, means[0]) for other in means[1:])


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "dense"], ids=case_id)
def test_a_gathered_mean_is_the_sum_in_peer_order(ranks: list[dict[Case, Any]], case: Case) -> None:
    expected = mean_by_hand(range(len(ranks)), COUNTS[case[1]], case[2])
    assert torch.equal(ranks[0][case][0], expected)


@pytest.mark.parametrize("world", [3, 4])
def test_another_order_gives_other_bits(world: int) -> None:
    """The control of the test above: it must be able to see a wrong order."""
    forward, backward = range(world), range(world - 1, -1, -1)
    assert not torch.equal(mean_by_hand(forward, N, False), mean_by_hand(backward, N, False))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_mean_is_the_dense_mean_to_rounding(ranks: list[dict[Case, Any]], case: Case) -> None:
    """At k = n this is the law that density 1.0 equals dense; below, the mean of what was selected."""
    world = len(ranks)
    parts = torch.stack([expanded(rank, COUNTS[case[1]], case[2]) for rank in range(world)]).double()
    # m - 1 additions and a division, each off by at most 2^-24 of the sum of magnitudes over m.
    bound = world * 2.0**-24 * parts.abs().sum(0) / world
    assert ((ranks[0][case][0].double() - parts.mean(0)).abs() <= bound).all()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_bytes_counted_are_bytes_announced(ranks: list[dict[Case, Any]], case: Case) -> None:
    for results in ranks:
        _, counted, announced = results[case]
        assert counted == announced > 0


def test_excluded_entries_are_averaged_where_nothing_is_compressed() -> None:
    """An empty compressed region: only the excluded entries travel."""
    means = run_ranks(2, _only_excluded)
    assert [mean.tolist() for mean in means] == [[0.5, 1.5]] * 2


def _only_excluded() -> torch.Tensor:
    link = Link(dist.group.WORLD, "inter", CommStats())
    payload = Payload(torch.zeros(0), torch.zeros(0, dtype=torch.int32), 0)
    out = torch.full((2,), torch.nan)
    AllGatherExchange(link, Wire("smallest")).mean_(payload, torch.tensor([0.0, 1.0]) + link.rank, out)
    return out


# ---- which exchange ---------------------------------------------------------------------------------------------


def peers(size: int) -> Any:
    return SimpleNamespace(size=size, rank=0)


def choose(
    k: int, n: int, size: int, *, kind: str = "cheapest", fallback: str = "dense", dense_numel: int = 0,
    shared: bool = False, encoding: str = "int32",
) -> tuple[Exchange | None, str]:  # fmt: skip
    settings = ExchangeSettings(type=kind, index_encoding=encoding)  # type: ignore[arg-type]
    return choose_exchange(settings, fallback, peers(size), k, n, dense_numel, shared=shared)


@pytest.mark.parametrize(
    "size, numel, sent", [(1, 100, 0), (2, 100, 400), (4, 100, 600), (4, 0, 0), (3, 10, 53), (2, 2**31 - 1, 8589934588)]
)
def test_bytes_of_a_dense_ring(size: int, numel: int, sent: int) -> None:
    """2 (m-1)/m of the vector: once around to sum it, once to spread the sum."""
    assert dense_bytes(numel, size) == sent


@pytest.mark.parametrize(
    "size, n, dense_numel, most",
    [
        # (m-1) messages of 8 k + 4 d bytes against 2 (m-1)/m * 4 (n + d):  k <= (n + d) / m - d / 2
        (2, 1000, 0, 500),
        (2, 1000, 100, 500),  # between two nodes, excluded entries cost the same either way
        (4, 1000, 0, 250),
        (4, 1000, 100, 225),
        (8, 1000, 0, 125),
    ],
)
def test_the_cheaper_one_is_taken(size: int, n: int, dense_numel: int, most: int) -> None:
    exchange, reason = choose(most, n, size, dense_numel=dense_numel)
    assert isinstance(exchange, AllGatherExchange) and reason == ""
    exchange, reason = choose(most + 1, n, size, dense_numel=dense_numel)
    assert exchange is None
    announced = AllGatherExchange(peers(size), Wire("int32")).wire_bytes(most + 1, n, dense_numel, shared=False)
    assert reason == (
        f"density {(most + 1) / n:.3g} on {size} nodes would send {announced} bytes a step, "
        f"dense {dense_bytes(n + dense_numel, size)}"
    )


def test_indices_that_are_not_sent_do_not_count() -> None:
    assert choose(500, 1000, 4, shared=False)[0] is None
    assert isinstance(choose(500, 1000, 4, shared=True)[0], AllGatherExchange)


def test_shorter_indices_make_more_densities_worth_while() -> None:
    assert choose(300, 1000, 4, encoding="int32")[0] is None
    assert isinstance(choose(300, 1000, 4, encoding="smallest")[0], AllGatherExchange)


def test_more_nodes_make_fewer_densities_worth_while() -> None:
    kinds = [choose(10, 1000, size)[0] is not None for size in (2, 4, 8, 64, 128)]
    assert kinds == [True, True, True, True, False]


@pytest.mark.parametrize("k", [1, 1000])
def test_a_dense_exchange_is_taken_when_asked_for(k: int) -> None:
    for fallback in ("dense", "off", "error"):
        exchange, reason = choose(k, 1000, 4, kind="dense", fallback=fallback)
        assert isinstance(exchange, DenseExchange) and reason == ""


def test_fallback_off_gathers_at_any_price() -> None:
    exchange, reason = choose(1000, 1000, 8, kind="all_gather", fallback="off")
    assert isinstance(exchange, AllGatherExchange) and reason == ""
    assert choose(1000, 1000, 8, kind="all_gather", fallback="dense")[0] is None  # the control


@pytest.mark.parametrize("kind", ["cheapest", "all_gather"])
def test_fallback_error_refuses_with_the_figures(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(500, 1000, 8, kind=kind, fallback="error")
    said = str(error.value)
    assert said.startswith("'compressed_communication.fallback' is 'error' and density 0.5 on 8 nodes would send 28000")
    assert f"dense {dense_bytes(1000, 8)}" in said
    assert "What to do: lower compressor.density, or set fallback to 'dense' or 'off'" in said


def test_fallback_error_lets_a_cheap_density_pass() -> None:
    assert isinstance(choose(10, 1000, 8, fallback="error")[0], AllGatherExchange)
