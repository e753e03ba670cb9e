"""The specification against plain Python, and the laws that every selection keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ops
from ops import reference
from ops.types import NAN_KEY, band_start, chunked_count

from .battery import same_bits
from .distributions import MAKERS, make

FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -3e-39, 3e38]),
                   st.floats(width=32))  # fmt: skip
VECTORS = st.lists(FLOATS, min_size=1, max_size=80)


def by_hand(values: list[float], k: int) -> list[int]:
    """Positions of the k largest magnitudes: NaN, then Inf, then by size; lowest index first."""

    def size(i: int) -> float:
        return math.inf if math.isnan(values[i]) else abs(values[i])

    order = sorted(range(len(values)), key=lambda i: (not math.isnan(values[i]), -size(i), i))
    return sorted(order[:k])


@settings(max_examples=200, deadline=None)
@given(values=VECTORS, fraction=st.floats(0, 1))
def test_topk_is_what_sorting_by_hand_gives(values: list[float], fraction: float) -> None:
    k = round(fraction * len(values))
    residual = torch.tensor(values)
    before = residual.clone()
    selection = reference.topk_(residual, None, k)
    assert selection.indices.tolist() == by_hand(values, k)
    same_bits("values", selection.values, before[selection.indices.long()])
    assert (residual[selection.indices.long()].view(torch.int32) == 0).all(), "emitted places hold +0"


@settings(max_examples=100, deadline=None)
@given(values=VECTORS, fraction=st.floats(0, 1), samplings=st.integers(1, 40), seed=st.integers(0, 2**64 - 1))
def test_every_selection_conserves_and_is_distinct(
    values: list[float], fraction: float, samplings: int, seed: int
) -> None:
    """sent + residual == accumulated, bitwise; exactly k distinct ascending indices; on the public calls."""
    n = len(values)
    k = round(fraction * n)
    before = torch.tensor(values) + 0.0  # -0 + 0 = +0, as the accumulation below makes it
    zero = torch.zeros(n)
    calls = [
        lambda r: ops.ef_topk_(r, zero, k),
        lambda r: ops.mstopk_(r, k, samplings=samplings, seed=seed, grad=zero),
        lambda r: ops.chunked_topk_(r, zero, min(k, 7), 7),
    ]
    for call, count in zip(calls, (k, k, chunked_count(n, min(k, 7), 7)), strict=True):
        residual = torch.tensor(values)
        selection = call(residual)
        assert selection.indices.numel() == count
        assert (selection.indices[1:] > selection.indices[:-1]).all()
        restored = residual.clone()
        restored[selection.indices.long()] = selection.values
        same_bits("sent + residual", restored, before)


def test_momentum_correction_by_hand() -> None:
    residual, velocity = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([2.0, 0.0, -4.0])
    selection = ops.ef_topk_(residual, torch.tensor([1.0, 1.0, 1.0]), 1, momentum=0.5, velocity=velocity, decay=0.5)
    # velocity: 2, 1, -1; residual: 0.5 + 2, -1 + 1, 0.25 - 1
    assert selection.values.tolist() == [2.5] and selection.indices.tolist() == [0]
    assert residual.tolist() == [0.0, 0.0, -0.75]
    assert velocity.tolist() == [0.0, 1.0, -1.0], "factor masking zeroes the velocity where an entry is emitted"
    assert float(selection.threshold) == 2.5


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("samplings", [1, 8, 30, 31, 99])
def test_mstopk_keeps_the_papers_invariants(name: str, samplings: int) -> None:
    """#{>= upper} <= k <= #{>= lower}; all of the first set emitted, nothing below the second."""
    x = make(name, 3000)
    keys = reference.magnitude_keys(x)
    k = 70
    selection = reference.mstopk_(x.clone(), None, k, samplings, seed=3)
    picked = keys[selection.indices.long()]
    lower = int(selection.threshold.view(torch.int32))
    assert int((keys >= lower).sum()) >= k and bool((picked >= lower).all())
    width = 1 << (31 - min(samplings, 31))
    above = keys.long() >= lower + width
    assert int(above.sum()) <= k
    assert set(torch.nonzero(above).flatten().tolist()) <= set(selection.indices.tolist())


def test_mstopk_run_is_contiguous_in_the_band_and_moves_with_the_seed() -> None:
    x = torch.ones(50)
    starts = set()
    for seed in range(300):
        indices = reference.mstopk_(x.clone(), None, 20, 30, seed).indices.tolist()
        assert indices == list(range(indices[0], indices[0] + 20))
        starts.add(indices[0])
    assert starts == set(range(31)), "every start that leaves room, and no other"


def test_one_outlier_does_not_break_mstopk() -> None:
    """A bisection by value between mean and max would settle nothing below 1e30 / 2^30."""
    x = make("one_outlier", 10_000)
    exact = reference.topk_(x.clone(), None, 100).indices
    found = reference.mstopk_(x.clone(), None, 100, 30, 0).indices
    assert len(set(exact.tolist()) & set(found.tolist())) >= 99


def test_all_nans_rank_equal_whatever_their_payload() -> None:
    bits = torch.tensor([0x7FC00000, 0x3F800000, 0x7F800002, 0x7FFFFFFF, 0x7F800000], dtype=torch.int32)
    assert reference.topk_(bits.view(torch.float32), None, 2).indices.tolist() == [0, 2]
    assert int(reference.magnitude_keys(bits.view(torch.float32)).max()) == NAN_KEY


def test_chunked_by_hand() -> None:
    residual = torch.tensor([1.0, -3.0, 2.0, 2.0, 5.0, -5.0, 9.0])
    selection = ops.chunked_topk_(residual, torch.zeros(7), 1, 3)
    assert selection.indices.tolist() == [1, 4, 6]
    assert selection.values.tolist() == [-3.0, 5.0, 9.0]
    assert float(selection.threshold) == 3.0
    assert chunked_count(7, 2, 3) == 5


def test_payloads_are_summed_in_peer_order() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32 and 1 in the other order: the order must be the sequence's."""
    at = torch.tensor([1], dtype=torch.int32)
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    out = torch.zeros(3)
    ops.sum_payloads_(out, [at] * 3, values)
    assert out.tolist() == [0.0, 0.0, 0.0]
    out = torch.zeros(3)
    ops.sum_payloads_(out, [at] * 3, [values[0], values[2], values[1]])
    assert out.tolist() == [0.0, 1.0, 0.0]


def test_band_start_is_uniform_enough_and_in_range() -> None:
    counts = torch.bincount(torch.tensor([band_start(seed, 10) for seed in range(10_000)]), minlength=10)
    # Binomial(10000, 0.1): standard deviation 30; five of them leave a chance of 6e-7 for a bin to fail.
    assert counts.numel() == 10 and bool(((counts - 1000).abs() < 150).all())
    assert band_start(2**64 - 1, 1) == 0
