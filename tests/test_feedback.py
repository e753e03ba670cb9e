"""Error feedback: nothing gets lost with it, something does without, and DGC's momentum goes by the book."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.accounting import CommStats
from ds_sparse.compressors import Compressor, Quota, RandomK, TopK
from ds_sparse.config import ErrorFeedbackSettings, parse
from ds_sparse.feedback import ErrorFeedback
from ds_sparse.links import Link
from ds_sparse.methods import Context, SparseGradient
from ds_sparse.payload import Payload
from ds_sparse.shard import Segment, ShardLayout
from tests.ranks import run_ranks

N, DENSE, STEPS = 50, 4, 30
LAYOUT = ShardLayout([Segment("w", N, dense=False), Segment("b", DENSE, dense=True)])
WHOLE = slice(0, N)


def feedback(*, owns: bool = False, **options: Any) -> ErrorFeedback:
    return ErrorFeedback(LAYOUT, torch.device("cpu"), ErrorFeedbackSettings(**options), owns=owns)


def gradients(n: int = N) -> list[torch.Tensor]:
    """Small whole numbers: fp32 adds and subtracts them exactly, so that sums compare without a tolerance."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-9, 10, (n,), generator=generator).float() for _ in range(STEPS)]


def _method(section: dict[str, Any], layout: ShardLayout) -> SparseGradient:
    """On each of the ranks, which are a node each."""
    peers, node = Link(dist.group.WORLD, "inter", CommStats()), SimpleNamespace(size=1)
    return SparseGradient(Context(parse(section), layout, torch.device("cpu"), peers, node, None, []))  # type: ignore[arg-type]


def take_(kept: ErrorFeedback, grad: torch.Tensor, k: int, step: int = 0, by: Compressor | None = None) -> Payload:
    """k of all entries."""
    return kept.take_(Quota(by or TopK(), k / N, N), grad, step, WHOLE)


def dense(payload: Payload, region: slice = WHOLE) -> torch.Tensor:
    """A payload for `region`, and zeros elsewhere."""
    vector = torch.zeros(N)
    vector[region][payload.indices.long()] = payload.values
    return vector


def sent_in_all(kept: ErrorFeedback, k: int = 3) -> torch.Tensor:
    return sum(dense(take_(kept, grad, k, step)) for step, grad in enumerate(gradients()))


# ---- the residual -----------------------------------------------------------------------------------------------


def test_what_was_sent_and_what_is_kept_are_all_gradients_together() -> None:
    kept = feedback()
    assert torch.equal(sent_in_all(kept) + kept.residual, sum(gradients()))
    assert kept.residual.count_nonzero() > N // 2  # there was something to keep


def test_without_feedback_what_is_not_sent_is_lost() -> None:
    """The control of the test above."""
    kept = feedback(enabled=False)
    assert not torch.equal(sent_in_all(kept), sum(gradients()))
    assert not kept.residual.any()


def test_an_entry_that_is_never_among_the_largest_is_sent_at_last() -> None:
    grad = torch.tensor([1.0, 0.3] + [0.0] * (N - 2))
    kept, blind = feedback(), feedback(enabled=False)
    taken = [take_(kept, grad, 1, step).indices.item() for step in range(8)]
    assert taken == [0, 0, 0, 1, 0, 0, 0, 1]  # 4 * 0.3 > 1
    assert [take_(blind, grad, 1, step).indices.item() for step in range(8)] == [0] * 8


def test_decay_shrinks_what_was_kept_not_what_is_new() -> None:
    kept = feedback(decay=0.5)
    grad = torch.tensor([8.0, 4.0] + [0.0] * (N - 2))
    values = [take_(kept, grad, 1, step).values.item() for step in range(3)]
    assert values == [8.0, 8.0, 8.0]
    assert kept.residual[1].item() == 4.0 * (1 + 0.5 + 0.25)


def test_taking_all_releases_what_was_kept_and_keeps_nothing() -> None:
    kept = feedback()
    sent = sent_in_all(kept)
    last = kept.take_all_(torch.ones(N))
    assert torch.equal(sent + last, sum(gradients()) + 1.0)
    assert not kept.residual.any()
    assert not torch.equal(last, torch.ones(N))  # what was kept did come with it


def test_what_was_taken_is_a_copy() -> None:
    kept = feedback()
    last = kept.take_all_(torch.ones(N))
    take_(kept, torch.full((N,), 5.0), 1)
    assert torch.equal(last, torch.ones(N))


# ---- parts of the shard -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_part_is_taken_as_if_it_stood_alone(momentum: float) -> None:
    """Region by region over many steps, with a quota, a residual and a velocity each."""
    regions = [slice(0, 17), slice(17, 18), slice(18, N)]
    kept, options = feedback(momentum=momentum), ErrorFeedbackSettings(momentum=momentum)
    layouts = [ShardLayout([Segment("w", part.stop - part.start, dense=False)]) for part in regions]
    alone = [ErrorFeedback(layout, torch.device("cpu"), options) for layout in layouts]
    for step, grad in enumerate(gradients()):
        for region, layout, other in zip(regions, layouts, alone, strict=True):
            one = kept.take_(Quota(TopK(), 0.1, N), grad[region], step, region)
            two = other.take_(Quota(TopK(), 0.1, layout.numel), grad[region], step, slice(0, layout.numel))
            assert one.form == two.form and one.form.k == {17: 2, 1: 1, 32: 4}[layout.numel]  # 10 %, rounded up
            assert torch.equal(one.indices, two.indices) and torch.equal(one.values, two.values)
        assert torch.equal(kept.residual, torch.cat([other.residual for other in alone]))


def _density_in_chunks() -> float:
    section = {
        "method": "sparse_gradient", "fallback": "off", "compressor": {"type": "topk", "density": 0.1},
        "exchange": {"type": "all_gather", "chunks": 3},
    }  # fmt: skip
    return _method(section, LAYOUT).exchange_(torch.arange(1.0, 1.0 + N + DENSE))


def test_the_density_reported_is_that_of_all_parts_together() -> None:
    """10 % of 16, 17 and 17 entries, each rounded up, are 6 of 50; of the whole it were 5."""
    assert run_ranks(2, _density_in_chunks) == [6 / N] * 2


def test_what_rounding_lost_is_kept_where_it_was_taken() -> None:
    kept, region = feedback(), slice(10, 20)
    payload = kept.take_(Quota(TopK(), 0.2, N), torch.arange(10.0), 0, region)
    before = kept.residual.clone()
    kept.give_back_(payload.indices, torch.tensor([0.5, -0.25]), region)
    assert (kept.residual - before).nonzero().flatten().tolist() == [18, 19]
    assert kept.residual[18:20].tolist() == [0.5, -0.25]


def test_without_feedback_nothing_is_given_back() -> None:
    """The control of the test above."""
    kept = feedback(owns=True, enabled=False)
    payload = take_(kept, torch.ones(N), 3)
    kept.give_back_(payload.indices, payload.values, WHOLE)
    taken = kept.take_owned_(torch.ones(N), 3, WHOLE)
    kept.give_back_owned_(taken.indices, taken.values)
    assert kept.norm() == 0.0


# ---- the second residual ----------------------------------------------------------------------------------------


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """What a rank does, in turn: the call, a range, and how much is taken."""
    calls = st.sampled_from(["owned", "owned", "part", "all", "disown", "load"])
    edges = st.tuples(st.integers(0, N), st.integers(0, N)).map(sorted)
    steps = draw(st.lists(st.tuples(calls, edges, st.integers(1, N)), min_size=1, max_size=12))
    return [(call, start, stop, k) for call, (start, stop), k in steps]


@settings(deadline=None, max_examples=150)
@given(_steps(), st.integers(0, 2**31))
def test_two_residuals_lose_nothing_wherever_the_ranges_move(steps: list[Any], seed: int) -> None:
    """In whole numbers, so exactly: sent + residual + owned == all that was given, after every call."""
    kept, generator = feedback(owns=True), torch.Generator().manual_seed(seed)
    given_, sent = torch.zeros(N), torch.zeros(N)
    assert kept.owned is not None
    for step, (call, start, stop, k) in enumerate(steps):
        region, new = slice(start, stop), torch.randint(-9, 10, (N,), generator=generator).float()
        if call == "owned":
            given_[region] += new[region]
            sent += dense(kept.take_owned_(new[region], min(k, stop - start), region), region)
            assert not kept.owned[:start].any() and not kept.owned[stop:].any()
        elif call == "part" and start < stop:
            given_[region] += new[region]
            sent += dense(kept.take_(Quota(TopK(), k / N, N), new[region], step, region), region)
        elif call == "all":
            given_ += new
            sent += kept.take_all_(new)
            assert kept.norm() == 0.0
        elif call == "disown":
            kept.disown_()
            assert not kept.owned.any()
        else:
            kept.loaded()
        assert torch.equal(sent + kept.residual + kept.owned, given_)


def test_an_owner_adds_what_it_kept_and_takes_the_largest() -> None:
    kept, region = feedback(owns=True), slice(10, 14)
    first = kept.take_owned_(torch.tensor([4.0, -3.0, 2.0, 1.0]), 1, region)
    assert (first.indices.tolist(), first.values.tolist(), first.form.numel) == ([0], [4.0], 4)
    second = kept.take_owned_(torch.tensor([0.0, -3.0, 2.0, 5.5]), 2, region)
    assert (second.indices.tolist(), second.values.tolist()) == ([1, 3], [-6.0, 6.5])
    assert kept.owned is not None and kept.owned[region].tolist() == [0.0, 0.0, 4.0, 0.0]
    assert not kept.residual.any()


def test_what_was_owned_goes_to_the_residual_when_the_range_moves() -> None:
    """From there the new owner gets it: this rank sends it as its own."""
    kept = feedback(owns=True)
    kept.take_owned_(torch.arange(1.0, 11.0), 1, slice(10, 20))
    kept.take_owned_(torch.zeros(10), 1, slice(15, 25))
    assert kept.residual.nonzero().flatten().tolist() == list(range(10, 15))
    assert kept.residual[10:15].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert kept.owned is not None and kept.owned.nonzero().flatten().tolist() == [15, 16, 17]  # 9 was the largest


@pytest.mark.parametrize("region", [slice(0, 0), slice(N, N), slice(20, 20)])
def test_a_rank_may_own_nothing(region: slice) -> None:
    kept = feedback(owns=True)
    kept.take_owned_(torch.ones(10), 1, slice(10, 20))
    payload = kept.take_owned_(torch.zeros(0), 0, region)
    assert (payload.form.k, payload.form.numel, payload.values.numel()) == (0, 0, 0)
    assert kept.residual.sum().item() == 9.0 and kept.owned is not None and not kept.owned.any()


def test_decay_shrinks_what_an_owner_kept() -> None:
    kept = feedback(owns=True, decay=0.5)
    for _ in range(3):
        kept.take_owned_(torch.tensor([8.0, 4.0]), 1, slice(0, 2))
    assert kept.owned is not None and kept.owned[1].item() == 4.0 * (1 + 0.5 + 0.25)


def test_what_rounding_lost_of_a_sum_is_kept_by_its_owner() -> None:
    kept = feedback(owns=True)
    taken = kept.take_owned_(torch.tensor([1.0, 5.0, 3.0]), 2, slice(7, 10))
    kept.give_back_owned_(taken.indices, torch.tensor([0.5, 0.25]))
    assert kept.owned is not None and kept.owned[7:10].tolist() == [1.0, 0.5, 0.25]


def test_without_feedback_an_owner_keeps_nothing() -> None:
    kept = feedback(owns=True, enabled=False)
    kept.take_owned_(torch.ones(10), 1, slice(0, 10))
    assert kept.norm() == 0.0


def test_the_norm_is_that_of_both_residuals() -> None:
    kept = feedback(owns=True)
    take_(kept, torch.tensor([5.0, 3.0] + [0.0] * (N - 2)), 1)
    kept.take_owned_(torch.tensor([9.0, 4.0]), 1, slice(20, 22))
    assert kept.norm() == 5.0  # 3 and 4 are left
    assert feedback().norm() == 0.0


def test_only_who_owns_has_a_second_residual() -> None:
    assert feedback().owned is None
    feedback().disown_()  # nothing to do


def _falling_density() -> tuple[list[bool], torch.Tensor]:
    """At 5 % another exchange is the cheapest than at 60 %. Whether sums were owned, and what is amiss in the end."""
    layout = ShardLayout([Segment("w", 4000, dense=False)])
    section = {
        "method": "sparse_gradient", "fallback": "off", "compressor": {"type": "topk", "density": 0.05},
        "schedule": {"densities": [0.6], "steps_per_density": 3},
        "exchange": {"link": {"gbit_per_second": 0.001, "latency_us": 0.0}},
    }  # fmt: skip
    method = _method(section, layout)
    owned, missing = [], torch.zeros(4000)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        vector = torch.randint(-9, 10, (4000,), generator=generator).float()
        missing += vector
        method.exchange_(vector)
        missing -= vector  # the mean over 4 nodes, on each of them
        assert method.feedback is not None and method.feedback.owned is not None
        owned.append(bool(method.feedback.owned.any()))
    return owned, missing - sum(method.feedback.state_dict().values())


def test_nothing_stays_owned_when_another_exchange_takes_over() -> None:
    """It would never be sent: `all_gather` knows one residual only. In quarters of whole numbers, so exactly."""
    results = run_ranks(4, _falling_density)
    assert [owned for owned, _ in results] == [[True, True, True, False, False]] * 4
    assert not sum(missing for _, missing in results).any()


# ---- DGC's momentum correction ----------------------------------------------------------------------------------


def dgc_by_hand(grads: list[torch.Tensor], taken: list[list[int]], momentum: float, mask: bool) -> list[list[float]]:
    """Lin et al. 2018, Algorithm 4, lines 5-14, entry by entry in double precision, for given selections."""
    velocity, residual, sent = [0.0] * N, [0.0] * N, []
    for grad, indices in zip(grads, taken, strict=True):
        for i in range(N):
            velocity[i] = momentum * velocity[i] + float(grad[i])
            residual[i] += velocity[i]
        sent.append([residual[i] for i in indices])
        for i in indices:
            residual[i] = 0.0
            velocity[i] = 0.0 if mask else velocity[i]
    return sent


def test_momentum_is_corrected_and_masked_as_in_dgc() -> None:
    kept = feedback(momentum=0.9)
    payloads = [take_(kept, grad, 5, step, RandomK(0)) for step, grad in enumerate(gradients())]
    taken = [payload.indices.tolist() for payload in payloads]
    masked, unmasked = (
        torch.tensor(dgc_by_hand(gradients(), taken, 0.9, mask), dtype=torch.float64) for mask in (True, False)
    )
    sent = torch.stack([payload.values for payload in payloads]).double()
    # 30 steps with two fp32 roundings each, of numbers up to about 1000: 60 * 1000 * 2^-24.
    torch.testing.assert_close(sent, masked, rtol=0, atol=4e-3)
    assert (sent - unmasked).abs().max() > 1.0  # the control: masking matters by far more than that


def test_the_velocity_stops_where_an_entry_was_sent_and_goes_on_elsewhere() -> None:
    kept = feedback(momentum=0.5)
    grad = torch.tensor([9.0, 1.0] + [0.0] * (N - 2))
    for step in range(3):
        take_(kept, grad, 1, step)
    assert kept.velocity is not None
    assert kept.velocity[:2].tolist() == [0.0, 1.75]  # 1 + 1/2 + 1/4
    assert kept.residual[:2].tolist() == [0.0, 1.0 + 1.5 + 1.75]


def test_taking_all_is_plain_momentum() -> None:
    """Nothing is held back, so nothing is masked: dense steps are ordinary SGD with momentum."""
    kept = feedback(momentum=0.5)
    sent = [kept.take_all_(torch.ones(N))[0].item() for _ in range(3)]
    assert sent == [1.0, 1.5, 1.75]


def _applied(**section: Any) -> list[torch.Tensor]:
    section = {"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}, "fallback": "off"} | section
    method = _method(section, LAYOUT)
    vectors = gradients(N + DENSE)[:8]  # the same on all nodes, so that a mean of two is exact
    for vector in vectors:
        method.exchange_(vector)
    return vectors


def _at_density_one() -> dict[str, list[torch.Tensor]]:
    full = {"compressor": {"type": "topk", "density": 1.0}}
    exchanges = ("dense", "cheapest", "all_gather", "reduce_scatter")
    return {name: _applied(**full, exchange={"type": name}) for name in exchanges} | {
        "three chunks": _applied(**full, exchange={"type": "all_gather", "chunks": 3}),
        "more chunks than entries": _applied(**full, exchange={"type": "all_gather", "chunks": 64}),
        "dense steps": _applied(schedule={"dense_steps": STEPS}),
        "control": _applied(compressor={"type": "topk", "density": 0.9}, exchange={"type": "all_gather"}),
    }


def test_density_one_with_momentum_is_plain_momentum() -> None:
    """Law: density 1.0 equals dense. Here bitwise against steps that the schedule declares dense."""
    for applied in run_ranks(2, _at_density_one):
        expected, control = applied.pop("dense steps"), applied.pop("control")
        for name, vectors in applied.items():
            assert all(torch.equal(a, b) for a, b in zip(vectors, expected, strict=True)), name
        assert not torch.equal(control[-1], expected[-1])


def test_excluded_entries_have_ordinary_momentum() -> None:
    kept = feedback(momentum=0.5)
    sent = [kept.take_dense_(torch.ones(DENSE)).tolist() for _ in range(3)]
    assert sent == [[1.0] * DENSE, [1.5] * DENSE, [1.75] * DENSE]


def test_excluded_entries_pass_unchanged_without_momentum() -> None:
    grad = torch.randn(DENSE)
    assert torch.equal(feedback().take_dense_(grad), grad)


# ---- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "momentum, owns, sizes",
    [
        (0.0, False, {"residual": N}),
        (0.0, True, {"residual": N, "owned": N}),
        (0.9, False, {"residual": N, "velocity": N, "dense_velocity": DENSE}),
        (0.9, True, {"residual": N, "owned": N, "velocity": N, "dense_velocity": DENSE}),
    ],
)
def test_the_state_holds_what_a_resumed_run_needs(momentum: float, owns: bool, sizes: dict[str, int]) -> None:
    kept = feedback(momentum=momentum, owns=owns)
    assert {name: tensor.numel() for name, tensor in kept.state_dict().items()} == sizes


def test_a_restored_state_goes_on_as_if_nothing_had_happened() -> None:
    old, new = feedback(momentum=0.9), feedback(momentum=0.9)
    sent_in_all(old)
    old.take_dense_(torch.ones(DENSE))
    for name, tensor in new.state_dict().items():
        tensor.copy_(old.state_dict()[name])  # live tensors: copying into them is loading
    new.loaded()
    assert torch.equal(sent_in_all(new), sent_in_all(old))
    assert torch.equal(new.take_dense_(torch.zeros(DENSE)), old.take_dense_(torch.zeros(DENSE)))


def test_a_restored_owner_gives_up_what_others_own_now() -> None:
    """Wherever the saved sums lie: a new object does not know which range they came from."""
    old, new = feedback(owns=True), feedback(owns=True)
    old.take_owned_(torch.arange(1.0, 11.0), 1, slice(30, 40))
    new.take_owned_(torch.zeros(0), 0, slice(0, 0))  # has owned nothing last
    for name, tensor in new.state_dict().items():
        tensor.copy_(old.state_dict()[name])
    new.loaded()
    new.take_owned_(torch.zeros(5), 1, slice(0, 5))
    assert new.owned is not None and not new.owned.any()
    assert new.residual[30:39].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_reset_forgets_everything() -> None:
    kept = feedback(momentum=0.9, owns=True)
    sent_in_all(kept)
    kept.take_owned_(torch.ones(10), 1, slice(0, 10))
    kept.take_dense_(torch.ones(DENSE))
    assert all(tensor.any() for tensor in kept.state_dict().values())
    kept.reset()
    assert not any(tensor.any() for tensor in kept.state_dict().values())


def test_a_shard_without_compressed_entries_has_an_empty_residual() -> None:
    layout = ShardLayout([Segment("b", 3, dense=True)])
    kept = ErrorFeedback(layout, torch.device("cpu"), ErrorFeedbackSettings(momentum=0.9))
    assert kept.residual.numel() == 0 and kept.take_all_(torch.zeros(0)).numel() == 0
