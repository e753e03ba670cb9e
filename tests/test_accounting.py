"""What is counted of a boundary: where its time went, which density was asked for, what was saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse import accounting, level2
from ds_sparse.accounting import PARTS, CommStats, StepStats
from ds_sparse.config import parse
from ds_sparse.feedback import ErrorFeedback
from ds_sparse.level2 import Level2
from ds_sparse.links import Flight, Link
from ds_sparse.methods import Context
from ds_sparse.monitor import events
from ds_sparse.shard import Segment, ShardLayout
from ds_sparse.wire import Wire
from tests.ranks import run_ranks

LAYOUT = ShardLayout([Segment("a", 600, False), Segment("bias", 10, True), Segment("b", 400, False)])
SPARSE = {"method": "sparse_gradient", "fallback": "off", "compressor": {"density": 0.02}}
SECTIONS = {
    "dense": {"method": "dense"},
    "dense exchange": SPARSE | {"exchange": {"type": "dense"}},
    "all_gather": SPARSE | {"exchange": {"type": "all_gather"}},
    "all_gather, int8, 3 chunks": SPARSE | {"exchange": {"type": "all_gather", "value_dtype": "int8", "chunks": 3}},
    "reduce_scatter": SPARSE | {"exchange": {"type": "reduce_scatter", "value_dtype": "int8"}},
}


def build(section: dict[str, Any], clip_norm: float = 0.0) -> Level2:
    """Level 2 of one rank a node."""
    stats = CommStats()
    peers, node = Link(dist.group.WORLD, "inter", stats), SimpleNamespace(size=1, sum_=lambda tensor: tensor)
    context = Context(parse(section), LAYOUT, torch.device("cpu"), peers, node, None, [])  # type: ignore[arg-type]
    return Level2(context, [], clip_norm, stats, lambda: 1)


def shard() -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(dist.get_rank()))


# ---- where the time went ----------------------------------------------------------------------------------------

COSTS = {  # seconds of one call, and the part that it belongs to
    (ErrorFeedback, "take_"): (1.0, "select"),
    (ErrorFeedback, "take_owned_"): (1.0, "select"),
    (Wire, "encode_"): (10.0, "encode"),
    (Flight, "wait"): (100.0, "exchange"),
    (Link, "deal"): (100.0, "exchange"),
    (Wire, "decode"): (1000.0, "decode"),
    (Level2, "_agree"): (10000.0, "rest"),
}


class _Clock:
    """A clock on which nothing takes time but calls in COSTS, each what is written there."""

    def __init__(self) -> None:
        self.now, self.spent, self._inside = 0.0, dict.fromkeys(PARTS, 0.0), 0
        accounting.time = level2.time = SimpleNamespace(perf_counter=lambda: self.now)  # type: ignore[assignment]
        for (owner, name), (seconds, part) in COSTS.items():
            setattr(owner, name, self._charge(getattr(owner, name), seconds, part))

    def _charge(self, call: Callable[..., Any], seconds: float, part: str) -> Callable[..., Any]:
        def charged(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:  # of nested calls, the outermost has them all
                self.now += seconds
                self.spent[part] += seconds
            self._inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._inside -= 1

        return charged


def _split(section: dict[str, Any]) -> tuple[StepStats, dict[str, float]]:
    under_test, clock = build(section), _Clock()
    under_test.exchange_(shard())
    return under_test.stats.last, clock.spent


@pytest.mark.parametrize("name", SECTIONS)
def test_time_is_counted_to_the_part_that_took_it(name: str) -> None:
    for last, spent in run_ranks(2, _split, SECTIONS[name]):
        assert {part: getattr(last, f"{part}_seconds") for part in spent} == spent
        assert last.seconds == sum(spent.values())
        sparse = name.startswith(("all_gather", "reduce_scatter"))
        assert spent["exchange"] > 0.0 and (spent["encode"] > 0.0) is (spent["decode"] > 0.0) is sparse
        assert (spent["select"] > 0.0) is (name != "dense")


def test_time_is_counted_of_a_block_that_raises() -> None:
    stats = CommStats()
    with pytest.raises(KeyError), stats.time("decode"):
        raise KeyError
    assert stats._open.decode_seconds > 0.0


# ---- what was asked for, and what was saved ---------------------------------------------------------------------


def _steps(section: dict[str, Any], steps: int) -> list[tuple[StepStats, float]]:
    under_test, seen = build(section), []
    for step in range(steps):
        gradient = shard()
        if step == 3:
            gradient[0] = math.nan
        under_test.exchange_(gradient)
        seen.append((under_test.stats.last, under_test.stats.total.density_asked))
    return seen


def test_the_density_that_was_asked_for_stands_beside_the_one_that_was_sent() -> None:
    schedule = {"dense_steps": 1, "densities": [0.5], "steps_per_density": 1}
    for seen in run_ranks(2, _steps, SPARSE | {"schedule": schedule}, 5):
        assert [last.density_asked for last, _ in seen] == [1.0, 0.5, 0.02, 0.02, 0.02]  # the fourth was skipped
        assert [last.skipped for last, _ in seen] == [0, 0, 0, 1, 0]
        assert [total for _, total in seen] == [last.density_asked for last, _ in seen]
        assert all(last.density == pytest.approx(last.density_asked) for last, _ in seen)


def test_a_fallback_to_dense_shows_in_the_two_densities() -> None:
    # With their indices, these are more bytes than all entries without.
    bytes_alone = {"type": "all_gather", "link": {"latency_us": 0, "gbit_per_second": 0.001}}
    section = {"method": "sparse_gradient", "compressor": {"density": 0.99}, "exchange": bytes_alone}
    for seen in run_ranks(2, _steps, section, 1):
        assert (seen[0][0].density_asked, seen[0][0].density) == (0.99, 1.0)


def _norms(section: dict[str, Any]) -> tuple[float, float, float]:
    under_test = build(section, clip_norm=0.1)
    gradient = shard()
    norm = float(gradient.norm())
    under_test.exchange_(gradient)
    first = under_test.grad_norm()
    under_test.exchange_(torch.full_like(gradient, math.inf))
    return norm, first, under_test.grad_norm()


def test_the_gradient_norm_is_this_ranks_own_before_clipping_and_outlives_a_skipped_step() -> None:
    ranks = run_ranks(2, _norms, SPARSE)
    assert ranks[0][0] != ranks[1][0]
    for norm, first, after_skip in ranks:
        assert first == pytest.approx(norm, rel=1e-6)  # the same sum in another order
        assert after_skip == first


def test_scalars_of_a_boundary_follow_from_the_counts() -> None:
    stats = CommStats(
        last=StepStats(1, 2_000, 300, 10_000, 6.5, 1.0, 2.0, 0.5, 0.25, density=0.02, density_asked=0.01),
        total=StepStats(exchanges=7, skipped=2, inter_node_bytes=3_000_000, dense_bytes=10_000_000),
    )
    written = events(stats, residual_norm=3.0, grad_norm=4.0, samples=64)
    assert {x for _, _, x in written} == {64}
    assert {tag.removeprefix("Comm/"): value for tag, value, _ in written} == {
        "inter_node_bytes": 2000.0, "intra_node_bytes": 300.0, "dense_bytes": 10000.0, "dense_over_wire": 5.0,
        "density": 0.02, "density_asked": 0.01, "residual_norm": 3.0, "residual_over_gradient": 0.75,
        "seconds": 6.5, "select_seconds": 1.0, "encode_seconds": 2.0, "exchange_seconds": 0.5,
        "decode_seconds": 0.25, "rest_seconds": 2.75, "exchanges": 7.0, "skipped": 2.0, "gb_saved": 0.007,
    }  # fmt: skip
    nothing_yet = events(CommStats(), residual_norm=0.0, grad_norm=0.0, samples=0)
    assert dict((tag, value) for tag, value, _ in nothing_yet)["Comm/residual_over_gradient"] == 0.0
