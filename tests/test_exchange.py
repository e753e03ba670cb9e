"""Exchanges: the mean of what the peers sent, in peer order, in as many bytes as announced; and which one is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_sparse import ConfigError
from ds_sparse.accounting import CommStats
from ds_sparse.compressors import Accumulation, Compressor, Quota, TopK
from ds_sparse.compressors.base import take_at_
from ds_sparse.config import ErrorFeedbackSettings, ExchangeSettings, parse
from ds_sparse.costs import dense_bytes, dense_cost
from ds_sparse.exchange import (
    EXCHANGES,
    AllGatherExchange,
    DenseExchange,
    Exchange,
    ReduceScatterExchange,
    choose_exchange,
)
from ds_sparse.feedback import ErrorFeedback, Offer
from ds_sparse.links import Link
from ds_sparse.payload import Form, Payload
from ds_sparse.shard import Segment, ShardLayout
from tests.ranks import run_ranks

N, EXCLUDED = 4133, 5  # odd, so that messages need padding, and more than a chunk
LAYOUT = ShardLayout([Segment("w", N, dense=False), Segment("b", EXCLUDED, dense=True)])
COUNTS = {"one": 1, "some": 40, "all but one": N - 1, "all": N}

# ---- what each rank sends ---------------------------------------------------------------------------------------


def vector_of(rank: int, step: int = 0) -> torch.Tensor:
    """Magnitudes span 2^26, so that almost every order of additions differs."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(N + EXCLUDED, generator=generator)
    return values * 2.0 ** torch.randint(-13, 14, values.shape, generator=generator)


class Shared(Compressor):
    """Every peer takes the first k entries."""

    shared_indices = True

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        residual += added.grad
        indices = torch.arange(form.k)
        return Payload(take_at_(residual, added, indices), indices.to(torch.int32), form)


COMPRESSORS: dict[str, Compressor] = {"topk": TopK(), "shared": Shared()}


class Setup(NamedTuple):
    """An exchange with its settings, in a line of a table."""

    exchange: str
    value_dtype: str = "fp32"
    index_encoding: str = "smallest"
    chunks: int = 1

    def build(self, link: Any) -> Exchange:
        settings = self._asdict()
        return EXCHANGES[self.exchange](link, ExchangeSettings(type=settings.pop("exchange"), **settings))


SETUPS = [
    Setup("dense"),
    Setup("all_gather"),
    Setup("all_gather", chunks=3),
    Setup("all_gather", index_encoding="int32"),
    Setup("all_gather", index_encoding="elias_fano"),
    Setup("all_gather", index_encoding="bitmap"),
    Setup("reduce_scatter"),
    Setup("reduce_scatter", index_encoding="int32"),
]
ROUNDED = [
    Setup(exchange, dtype)
    for exchange in ("all_gather", "reduce_scatter")
    for dtype in ("bf16", "fp16", "int8", "int4", "int2")
]
Case = tuple[Setup, str, str]  # and names of a count and of a compressor
CASES: list[Case] = [(setup, k, compressor) for setup in SETUPS for k in COUNTS for compressor in COMPRESSORS]
LOSSLESS = [case for case in CASES if case[0].exchange != "reduce_scatter" or case[1] == "all"]


class Result(NamedTuple):
    """What one rank has after an exchange."""

    mean: torch.Tensor
    feedback: dict[str, torch.Tensor]
    sent: int
    announced: int


def exchange_once(setup: Setup, k: int, compressor: Compressor, steps: int = 1, **feedback: Any) -> list[Result]:
    """On this rank, for each of `steps` steps."""
    stats = CommStats()
    link = Link(dist.group.WORLD, "inter", stats)
    exchange = setup.build(link)
    kept = ErrorFeedback(LAYOUT, torch.device("cpu"), ErrorFeedbackSettings(**feedback), owns=exchange.owns)
    quota, results = Quota(compressor, k / N, N), []
    for step in range(steps):
        vector, before = vector_of(link.rank, step), stats._open.inter_node_bytes
        exchange.mean_(Offer(kept, quota, vector[:N], step), vector)
        state = {name: tensor.clone() for name, tensor in kept.state_dict().items()}
        sent = stats._open.inter_node_bytes - before
        results.append(Result(vector, state, sent, exchange.cost(quota, EXCLUDED).sent))
    return results


def _all_cases() -> dict[Case, Result]:
    return {case: exchange_once(case[0], COUNTS[case[1]], COMPRESSORS[case[2]])[0] for case in CASES}


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[Case, Result]]:
    """All cases on one set of ranks: forking costs more than exchanging."""
    return run_ranks(request.param, _all_cases)


def case_id(case: Case) -> str:
    setup, k, compressor = case
    return "-".join(map(str, (*setup, k, compressor)))


every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


def kept_by(results: list[Result]) -> torch.Tensor:
    """All that the ranks did not send, in double precision."""
    return torch.stack([sum(state.double() for state in result.feedback.values()) for result in results]).sum(0)


def bound(world: int, steps: int = 1) -> torch.Tensor:
    """What fp32 sums and the division for the mean may be off by: each rounds by 2^-24 of the magnitudes in it."""
    magnitudes = sum(vector_of(rank, step).double().abs() for rank in range(world) for step in range(steps))
    return (2 * world + 1) * steps * 2.0**-24 * magnitudes


def assert_conserved(results: list[list[Result]]) -> None:
    """sent + residuals == accumulated, over all ranks and steps; the excluded entries are all sent."""
    world, steps = len(results), len(results[0])
    given = sum(vector_of(rank, step).double() for rank in range(world) for step in range(steps))
    sent = world * sum(result.mean.double() for result in results[0])
    sent[:N] += kept_by([rank[-1] for rank in results])
    assert ((sent - given).abs() <= bound(world, steps)).all()


# ---- laws of one exchange ---------------------------------------------------------------------------------------


@every_case
def test_every_peer_holds_the_same_bits(ranks: list[dict[Case, Result]], case: Case) -> None:
    means = [results[case].mean.view(torch.int32) for results in ranks]
    assert all(torch.equal(other, means[0]) for other in means[1:])


@every_case
def test_what_was_sent_and_what_is_kept_is_what_there_was(ranks: list[dict[Case, Result]], case: Case) -> None:
    assert_conserved([[results[case]] for results in ranks])


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: "-".join(map(str, setup)))
def test_density_one_equals_dense(ranks: list[dict[Case, Result]], setup: Setup) -> None:
    dense = sum(vector_of(rank).double() for rank in range(len(ranks))) / len(ranks)
    for results in ranks:
        result = results[setup, "all", "topk"]
        assert ((result.mean.double() - dense).abs() <= bound(len(ranks)) / len(ranks)).all()
        assert not any(state.any() for state in result.feedback.values())


@pytest.mark.parametrize("case", LOSSLESS, ids=case_id)
def test_the_mean_is_that_of_the_selected_entries(ranks: list[dict[Case, Result]], case: Case) -> None:
    """Whatever the exchange; only reduce_scatter selects again."""
    setup, count, compressor = case
    world, total = len(ranks), torch.zeros(N, dtype=torch.float64)
    for rank in range(world):
        for region in regions(setup.chunks):
            part = vector_of(rank)[region]
            form = COMPRESSORS[compressor].form(COUNTS[count] / N, part.numel())
            payload = COMPRESSORS[compressor].take_(torch.zeros_like(part), Accumulation(part), form, 0)
            total[region][payload.indices.long()] += payload.values.double()
    assert ((ranks[0][case].mean[:N].double() - total / world).abs() <= bound(world)[:N] / world).all()


def regions(chunks: int) -> list[slice]:
    edges = [N * chunk // chunks for chunk in range(chunks + 1)]
    return [slice(*pair) for pair in zip(edges, edges[1:], strict=False)]


def test_payloads_are_summed_in_peer_order(ranks: list[dict[Case, Result]]) -> None:
    """Bit for bit; with its control, that another order can be told apart."""
    world = len(ranks)

    def mean(order: Any) -> torch.Tensor:
        total = torch.zeros(N)
        for rank in order:
            total += vector_of(rank)[:N] / world
        return total

    assert torch.equal(ranks[0][Setup("all_gather"), "all", "topk"].mean[:N], mean(range(world)))
    assert world == 2 or not torch.equal(mean(range(world)), mean(range(world - 1, -1, -1)))


@every_case
def test_bytes_counted_are_bytes_announced(ranks: list[dict[Case, Result]], case: Case) -> None:
    """To the byte, but for reduce_scatter, whose parts depend on where the entries fall."""
    for results in ranks:
        sent, announced = results[case].sent, results[case].announced
        if case[0].exchange != "reduce_scatter":
            assert sent == announced > 0
        elif case[1] in ("all but one", "all"):  # of few entries, all may lie with one owner
            assert sent == pytest.approx(announced, rel=0.05)


# ---- many steps, rounding ---------------------------------------------------------------------------------------


def _over_steps() -> dict[Any, list[Result]]:
    results = {setup: exchange_once(setup, 200, TopK(), steps=6) for setup in [*SETUPS, *ROUNDED]}
    for setup in (Setup("reduce_scatter"), Setup("all_gather", "int8")):
        results[setup, "no feedback"] = exchange_once(setup, 200, TopK(), steps=6, enabled=False)
    return results


@pytest.fixture(scope="module")
def over_steps() -> list[dict[Any, list[Result]]]:
    return run_ranks(3, _over_steps)


@pytest.mark.parametrize("setup", [*SETUPS, *ROUNDED], ids=lambda setup: "-".join(map(str, setup)))
def test_nothing_is_lost_over_many_steps(over_steps: list[dict[Any, list[Result]]], setup: Setup) -> None:
    """Ranges of owners move from step to step, and what rounding on the wire loses is kept."""
    assert_conserved([results[setup] for results in over_steps])
    for step in range(6):
        means = [results[setup][step].mean.view(torch.int32) for results in over_steps]
        assert all(torch.equal(other, means[0]) for other in means[1:])


@pytest.mark.parametrize("setup", [Setup("reduce_scatter"), Setup("all_gather", "int8")], ids=lambda s: s.exchange)
def test_without_feedback_something_is_lost(over_steps: list[dict[Any, list[Result]]], setup: Setup) -> None:
    """The control of the test above."""
    with pytest.raises(AssertionError):
        assert_conserved([results[setup, "no feedback"] for results in over_steps])
    last = over_steps[0][setup, "no feedback"][-1].feedback
    assert not any(state.any() for state in last.values())


def test_a_rounded_value_is_on_its_grid(over_steps: list[dict[Any, list[Result]]]) -> None:
    """The control of `value_dtype`: rounding takes place."""
    exact, rounded = (over_steps[0][Setup("all_gather", dtype)][0] for dtype in ("fp32", "bf16"))
    assert not torch.equal(exact.mean, rounded.mean)
    assert rounded.sent < exact.sent


def test_an_owner_keeps_sums_and_passes_them_on(over_steps: list[dict[Any, list[Result]]]) -> None:
    """The second residual is in use, within one range, and what was kept there comes later."""
    for results in over_steps:
        owned = [result.feedback["owned"] for result in results[Setup("reduce_scatter")]]
        assert all(tensor.any() for tensor in owned)
        assert all(tensor.nonzero().max() - tensor.nonzero().min() < N // 2 for tensor in owned)


# ---- small shards -----------------------------------------------------------------------------------------------

SMALL_SETUPS = [
    Setup("dense"),
    Setup("all_gather", chunks=64),  # more than entries
    Setup("reduce_scatter"),
    Setup("all_gather", "int8", chunks=2),
    Setup("reduce_scatter", "int2"),
]


def _small_shards() -> dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What was given, what came, and what is kept in the end; in few bits, so that only rounding on the wire rounds."""
    results = {}
    for setup in SMALL_SETUPS:
        link = Link(dist.group.WORLD, "inter", CommStats())
        for n in (1, 2, 5):
            for k in {1, n - 1, n} - {0}:
                exchange, layout = setup.build(link), ShardLayout([Segment("w", n, dense=False)])
                kept = ErrorFeedback(layout, torch.device("cpu"), ErrorFeedbackSettings(), owns=exchange.owns)
                given, came = torch.zeros(n), torch.zeros(n)
                for step in range(3):
                    generator = torch.Generator().manual_seed(10 * step + link.rank)
                    vector = torch.randint(-9, 10, (n,), generator=generator).float()
                    given += vector
                    exchange.mean_(Offer(kept, Quota(TopK(), k / n, n), vector, step), vector)
                    came += vector
                results[setup, n, k] = given, came, sum(kept.state_dict().values())
    return results


def test_a_shard_may_be_smaller_than_the_number_of_nodes() -> None:
    """Some own nothing, most parts are empty: equal bits everywhere, and nothing is lost."""
    world = 4
    ranks = run_ranks(world, _small_shards)
    for case in ranks[0]:
        given, came, kept = (torch.stack(tensors) for tensors in zip(*(rank[case] for rank in ranks), strict=True))
        assert all(torch.equal(other, came[0]) for other in came)
        exact = case[0].value_dtype == "fp32"  # quarters of whole numbers; else a few roundings of numbers below 256
        lost = (given.sum(0) - world * came[0] - kept.sum(0)).abs()
        assert (lost <= (0.0 if exact else 100 * 256 * 2.0**-24)).all(), case


# ---- the cost of reduce_scatter ---------------------------------------------------------------------------------


def _bytes_sent(numel: int) -> int:
    stats = CommStats()
    link = Link(dist.group.WORLD, "inter", stats)
    layout = ShardLayout([Segment("w", numel, dense=False)])
    kept = ErrorFeedback(layout, torch.device("cpu"), ErrorFeedbackSettings(), owns=True)
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(link.rank))
    Setup("reduce_scatter").build(link).mean_(Offer(kept, Quota(TopK(), 0.01, numel), vector, 0), vector)
    return stats._open.inter_node_bytes


def test_a_rank_sends_as_much_on_eight_nodes_as_on_two() -> None:
    """Ten million elements, so that the counts of the buckets, 4 kB to each peer, do not matter."""
    sent = [max(run_ranks(world, _bytes_sent, 10_000_000)) for world in (2, 4, 8)]
    assert max(sent) <= 1.15 * min(sent)


def _crowded() -> tuple[int, int]:
    """All entries in one part of the shard; bytes sent, and the entries in the owned range."""
    link = Link(dist.group.WORLD, "inter", CommStats())
    exchange = ReduceScatterExchange(link, Setup("reduce_scatter").build(link)._wire)
    indices = torch.arange(N - 400, N, dtype=torch.int32)
    ranges, counts = exchange._ranges(Payload(torch.ones(400), indices, Form(400, N)))
    return sum(row[link.rank] for row in counts), ranges[link.rank].stop


def test_ranges_follow_the_entries() -> None:
    """Not the indices: each owner has as many entries as the others, to a bucket (4133 / 1024 -> 5 of each peer)."""
    results = run_ranks(4, _crowded)
    assert [stop for _, stop in results][-1] == N
    assert all(abs(entries - 400) <= 2 * 4 * 5 for entries, _ in results)


def test_the_model_says_so_too() -> None:
    """With its control: a gather grows with the nodes."""

    def sent(world: int) -> int:
        return ReduceScatterExchange(peers(world), _wire()).cost(Quota(TopK(), 0.01, 25_000_000), 0).sent

    figures = [sent(world) for world in (2, 4, 8)]
    assert max(figures) <= 1.15 * min(figures)
    gathered = [AllGatherExchange(peers(m), _wire()).cost(Quota(TopK(), 0.01, 25_000_000), 0).sent for m in (2, 8)]
    assert gathered[1] == 7 * gathered[0]


def _wire() -> Any:
    return Setup("reduce_scatter").build(peers(2))._wire


# ---- excluded entries -------------------------------------------------------------------------------------------


def test_excluded_entries_are_averaged_where_nothing_is_compressed() -> None:
    """An empty compressed region: only the excluded entries travel."""
    means = run_ranks(2, _only_excluded)
    assert [mean.tolist() for mean in means] == [[0.5, 1.5]] * 2


def _only_excluded() -> torch.Tensor:
    link = Link(dist.group.WORLD, "inter", CommStats())
    vector = torch.tensor([0.0, 1.0]) + link.rank
    kept = ErrorFeedback(ShardLayout([Segment("b", 2, dense=True)]), vector.device, ErrorFeedbackSettings())
    Setup("dense").build(link).mean_(Offer(kept, Quota(TopK(), 0.01, 0), vector[:0], 0), vector)
    return vector


# ---- which exchange ---------------------------------------------------------------------------------------------


def peers(size: int) -> Any:
    return SimpleNamespace(size=size, rank=0)


def choose(
    density: float, size: int, *, n: int = 10_000_000, excluded: int = 0, compressor: Compressor | None = None,
    fallback: str = "dense", ranks_per_node: int = 1, **exchange: Any,
) -> tuple[Exchange | None, str]:  # fmt: skip
    config = parse({"fallback": fallback, "exchange": exchange})
    return choose_exchange(config, peers(size), ranks_per_node, Quota(compressor or TopK(), density, n), excluded)


@pytest.mark.parametrize(
    "size, numel, sent", [(1, 100, 0), (2, 100, 400), (4, 100, 600), (4, 0, 0), (3, 10, 53), (2, 2**31 - 1, 8589934588)]
)
def test_bytes_of_a_dense_ring(size: int, numel: int, sent: int) -> None:
    """2 (m-1)/m of the vector: once around to sum it, once to spread the sum."""
    assert dense_bytes(numel, size) == sent


@pytest.mark.parametrize(
    "density, size, kind",
    [
        (0.01, 2, AllGatherExchange),  # one message is less than two halves
        (0.01, 16, ReduceScatterExchange),  # fifteen are not
        (0.01, 512, ReduceScatterExchange),
        (0.9, 2, type(None)),
        (0.9, 16, type(None)),
    ],
)
def test_the_cheapest_depends_on_density_and_nodes(density: float, size: int, kind: type) -> None:
    assert type(choose(density, size)[0]) is kind


def test_the_link_decides_too() -> None:
    """A fast link does not pay for the selection; a slow one does."""
    slow, fast = ({"gbit_per_second": rate, "latency_us": 1.0} for rate in (1.0, 400.0))
    assert isinstance(choose(0.05, 2, link=slow)[0], AllGatherExchange)
    assert choose(0.05, 2, link=fast)[0] is None
    assert isinstance(choose(0.05, 2, link=fast, ranks_per_node=64)[0], AllGatherExchange)  # each has a 64th of it


def test_latency_counts_for_short_shards() -> None:
    """A ring of dense messages waits 2 (m-1) times, a gather (m-1) times."""
    one_message = {"n": 10_000, "link": {"latency_us": 1000.0}}
    assert isinstance(choose(0.05, 4, **one_message)[0], AllGatherExchange)
    assert choose(0.05, 4, **one_message | {"type": "reduce_scatter"})[0] is None


def test_indices_that_are_not_sent_do_not_count() -> None:
    slow = {"gbit_per_second": 0.01}
    assert choose(0.97, 2, compressor=TopK(), link=slow)[0] is None
    assert isinstance(choose(0.97, 2, compressor=Shared(), link=slow)[0], AllGatherExchange)


@pytest.mark.parametrize("density", [1e-3, 1.0])
def test_a_dense_exchange_is_taken_when_asked_for(density: float) -> None:
    for fallback in ("dense", "off", "error"):
        exchange, reason = choose(density, 4, type="dense", fallback=fallback)
        assert isinstance(exchange, DenseExchange) and reason == ""


@pytest.mark.parametrize(
    "kind, expected", [("all_gather", AllGatherExchange), ("reduce_scatter", ReduceScatterExchange)]
)
def test_fallback_off_compresses_at_any_price(kind: str, expected: type) -> None:
    exchange, reason = choose(1.0, 8, type=kind, fallback="off")
    assert isinstance(exchange, expected) and reason == ""
    assert choose(1.0, 8, type=kind, fallback="dense")[0] is None  # the control


@pytest.mark.parametrize("kind", ["cheapest", "all_gather"])
def test_fallback_error_refuses_with_the_figures(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(0.9, 2, n=1_000_000, type=kind, fallback="error")
    said, dense = str(error.value), dense_cost(1_000_000, 2)
    assert said.startswith("'compressed_communication.fallback' is 'error' and density 0.9 on 2 nodes would send ")
    # 4 MB at 1.25 GB/s, and two waits of 100 us
    assert f"dense {dense.sent} bytes in 3.4 ms, on a link of 10 Gbit/s and 100 us" in said
    assert "What to do: lower compressor.density, say what the link is like in exchange.link, or set fallback" in said


def test_fallback_dense_gives_the_reason() -> None:
    assert "density 0.9 on 2 nodes would send" in choose(0.9, 2)[1]


def test_fallback_error_lets_a_cheap_density_pass() -> None:
    assert isinstance(choose(0.01, 2, fallback="error")[0], AllGatherExchange)
