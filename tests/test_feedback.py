"""Error feedback: nothing gets lost with it, something does without, and DGC's momentum goes by the book."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sparse.compressors import RandomK, TopK
from ds_sparse.config import ErrorFeedbackSettings, parse
from ds_sparse.feedback import ErrorFeedback
from ds_sparse.methods import Context, SparseGradient
from ds_sparse.shard import Segment, ShardLayout

N, DENSE, STEPS = 50, 4, 30
LAYOUT = ShardLayout([Segment("w", N, dense=False), Segment("b", DENSE, dense=True)])


def feedback(**settings: Any) -> ErrorFeedback:
    return ErrorFeedback(LAYOUT, torch.device("cpu"), ErrorFeedbackSettings(**settings))


def gradients(n: int = N) -> list[torch.Tensor]:
    """Small whole numbers: fp32 adds and subtracts them exactly, so that sums compare without a tolerance."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-9, 10, (n,), generator=generator).float() for _ in range(STEPS)]


def sent_in_all(kept: ErrorFeedback, k: int = 3) -> torch.Tensor:
    total = torch.zeros(N)
    for step, grad in enumerate(gradients()):
        payload = kept.take_(TopK(), grad, k, step)
        total[payload.indices.long()] += payload.values
    return total


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
    taken = [kept.take_(TopK(), grad, 1, step).indices.item() for step in range(8)]
    assert taken == [0, 0, 0, 1, 0, 0, 0, 1]  # 4 * 0.3 > 1
    assert [blind.take_(TopK(), grad, 1, step).indices.item() for step in range(8)] == [0] * 8


def test_decay_shrinks_what_was_kept_not_what_is_new() -> None:
    kept = feedback(decay=0.5)
    grad = torch.tensor([8.0, 4.0] + [0.0] * (N - 2))
    values = [kept.take_(TopK(), grad, 1, step).values.item() for step in range(3)]
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
    kept.take_(TopK(), torch.full((N,), 5.0), 1, 0)
    assert torch.equal(last, torch.ones(N))


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
    payloads = [kept.take_(RandomK(0), grad, 5, step) for step, grad in enumerate(gradients())]
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
        kept.take_(TopK(), grad, 1, step)
    assert kept.velocity is not None
    assert kept.velocity[:2].tolist() == [0.0, 1.75]  # 1 + 1/2 + 1/4
    assert kept.residual[:2].tolist() == [0.0, 1.0 + 1.5 + 1.75]


def test_taking_all_is_plain_momentum() -> None:
    """Nothing is held back, so nothing is masked: dense steps are ordinary SGD with momentum."""
    kept = feedback(momentum=0.5)
    sent = [kept.take_all_(torch.ones(N))[0].item() for _ in range(3)]
    assert sent == [1.0, 1.5, 1.75]


@pytest.mark.parametrize("exchange", ["dense", "cheapest"])
def test_density_one_with_momentum_is_plain_momentum(exchange: str) -> None:
    """Law: density 1.0 equals dense. Here against steps that the schedule declares dense."""

    def applied(**section: Any) -> list[torch.Tensor]:
        section |= {"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}, "exchange": {"type": exchange}}
        peers: Any = SimpleNamespace(size=2, rank=0, sum_=lambda tensor: tensor.mul_(2))  # two equal nodes
        method = SparseGradient(Context(parse(section), LAYOUT, torch.device("cpu"), peers, peers, None, []))
        vectors = gradients(N + DENSE)
        for vector in vectors:
            method.exchange_(vector)
        return vectors

    dense = applied(schedule={"dense_steps": STEPS})
    full = applied(compressor={"type": "topk", "density": 1.0})
    assert all(torch.equal(a, b) for a, b in zip(full, dense, strict=True))


def test_excluded_entries_have_ordinary_momentum() -> None:
    kept = feedback(momentum=0.5)
    sent = [kept.take_dense_(torch.ones(DENSE)).tolist() for _ in range(3)]
    assert sent == [[1.0] * DENSE, [1.5] * DENSE, [1.75] * DENSE]


def test_excluded_entries_pass_unchanged_without_momentum() -> None:
    grad = torch.randn(DENSE)
    assert torch.equal(feedback().take_dense_(grad), grad)


# ---- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "momentum, sizes", [(0.0, {"residual": N}), (0.9, {"residual": N, "velocity": N, "dense_velocity": DENSE})]
)
def test_the_state_holds_what_a_resumed_run_needs(momentum: float, sizes: dict[str, int]) -> None:
    kept = feedback(momentum=momentum)
    assert {name: tensor.numel() for name, tensor in kept.state_dict().items()} == sizes


def test_a_restored_state_goes_on_as_if_nothing_had_happened() -> None:
    old, new = feedback(momentum=0.9), feedback(momentum=0.9)
    sent_in_all(old)
    old.take_dense_(torch.ones(DENSE))
    for name, tensor in new.state_dict().items():
        tensor.copy_(old.state_dict()[name])  # live tensors: copying into them is loading
    assert torch.equal(sent_in_all(new), sent_in_all(old))
    assert torch.equal(new.take_dense_(torch.zeros(DENSE)), old.take_dense_(torch.zeros(DENSE)))


def test_reset_forgets_everything() -> None:
    kept = feedback(momentum=0.9)
    sent_in_all(kept)
    kept.take_dense_(torch.ones(DENSE))
    assert all(tensor.any() for tensor in kept.state_dict().values())
    kept.reset()
    assert not any(tensor.any() for tensor in kept.state_dict().values())


def test_a_shard_without_compressed_entries_has_an_empty_residual() -> None:
    layout = ShardLayout([Segment("b", 3, dense=True)])
    kept = ErrorFeedback(layout, torch.device("cpu"), ErrorFeedbackSettings(momentum=0.9))
    assert kept.residual.numel() == 0 and kept.take_all_(torch.zeros(0)).numel() == 0
