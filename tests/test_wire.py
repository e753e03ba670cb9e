"""Messages: every payload comes back bit for bit, in exactly as many bytes as were announced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_sparse.payload import Payload
from ds_sparse.wire import INDEX_ENCODINGS, Wire

ENCODINGS = [*INDEX_ENCODINGS, "smallest"]

# Index sets that break encoders: (indices, n).
ADVERSARIAL = {
    "nothing of nothing": ([], 0),
    "nothing": ([], 1000),
    "one of one": ([0], 1),
    "first": ([0], 1000),
    "last": ([999], 1000),
    "both ends": ([0, 999], 1000),
    "all": (range(1000), 1000),
    "all of a byte": (range(8), 8),
    "all but one": ([*range(500), *range(501, 1000)], 1000),
    "a run at the start": (range(100), 1000),
    "a run at the end": (range(900, 1000), 1000),  # all high parts are large
    "every other": (range(0, 1000, 2), 1000),
    "half, the upper one": (range(512, 1024), 1024),  # n/k = 2: one low bit
    "n/k just below a power of two": (range(0, 1023, 4), 1023),
    "n one above a power of two": ([0, 511, 512], 513),
    "the largest n there is": ([0, 1, 2**30, 2**31 - 2], 2**31 - 1),
    "one, far out": ([2**31 - 2], 2**31 - 1),
}


def payload_of(indices: list[int], n: int, seed: int = 0) -> Payload:
    """Values are random bit patterns: denormals, NaNs, both zeros and infinities among them."""
    bits = torch.randint(-(2**31), 2**31, (len(indices),), generator=torch.Generator().manual_seed(seed))
    return Payload(bits.to(torch.int32).view(torch.float32), torch.tensor(indices, dtype=torch.int32), n)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).tolist()


def assert_round_trip(encoding: str, payload: Payload, dense: torch.Tensor) -> None:
    wire = Wire(encoding)
    message = wire.encode(payload, dense)
    k = payload.values.numel()
    assert message.dtype == torch.uint8
    assert message.numel() == wire.message_bytes(k, payload.numel, dense.numel(), shared=payload.shared)
    assert message.numel() % 4 == 0  # a message behind this one has aligned values
    other = Payload(torch.zeros(k), torch.arange(k, dtype=torch.int32), payload.numel)  # a peer's own choice
    values, indices, received = wire.decode(message, own=other)
    assert indices.dtype == torch.int32 and indices.tolist() == payload.indices.tolist()
    assert bits(values) == bits(payload.values) and bits(received) == bits(dense)


def affordable(encoding: str, case: str) -> bool:
    return encoding != "bitmap" or ADVERSARIAL[case][1] < 10**6  # a bitmap of 2^31 bits is 256 MiB


@pytest.mark.parametrize("encoding, case", [(e, c) for e in ENCODINGS for c in ADVERSARIAL if affordable(e, c)])
@pytest.mark.parametrize("dense_numel", [0, 3])
def test_adversarial_index_sets_come_back(encoding: str, case: str, dense_numel: int) -> None:
    indices, n = ADVERSARIAL[case]
    assert_round_trip(encoding, payload_of(list(indices), n), torch.randn(dense_numel))


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    n = draw(st.integers(1, 700))
    mostly = draw(st.booleans())  # so that dense sets come up as often as sparse ones
    chosen = draw(st.sets(st.integers(0, n - 1), max_size=min(n, 60)))
    return sorted(set(range(n)) - chosen if mostly else chosen), n


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(deadline=None, max_examples=100)
@given(index_sets(), st.integers(0, 5), st.integers(0, 2**31))
def test_any_index_set_comes_back(encoding: str, case: tuple[list[int], int], dense_numel: int, seed: int) -> None:
    assert_round_trip(encoding, payload_of(*case, seed), torch.randn(dense_numel))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("k, n, dense_numel", [(0, 5, 0), (1, 1, 0), (3, 10, 4)])
def test_a_shared_payload_sends_no_indices(encoding: str, k: int, n: int, dense_numel: int) -> None:
    own = payload_of(list(range(k)), n)
    shared = Payload(own.values, own.indices, n, shared=True)
    dense = torch.randn(dense_numel)
    wire = Wire(encoding)
    message = wire.encode(shared, dense)
    assert message.numel() == wire.message_bytes(k, n, dense_numel, shared=True) == 4 * (k + dense_numel)
    values, indices, received = wire.decode(message, own=shared)
    assert bits(values) == bits(shared.values) and bits(received) == bits(dense)
    assert indices.tolist() == shared.indices.tolist()


def test_messages_of_several_peers_are_read_out_of_one_buffer() -> None:
    """As they stand after an all-gather; odd lengths, so that padding has to keep the second one aligned."""
    payloads = [payload_of([0, 4, 9], 11, seed=1), payload_of([2, 3, 10], 11, seed=2)]
    dense = torch.tensor([[1.0, -2.0], [3.0, torch.inf]])
    for encoding in ENCODINGS:
        wire = Wire(encoding)
        gathered = torch.stack([wire.encode(payload, row) for payload, row in zip(payloads, dense, strict=True)])
        for message, payload, row in zip(gathered, payloads, dense, strict=True):
            values, indices, received = wire.decode(message, own=payloads[0])
            assert bits(values) == bits(payload.values)
            assert indices.tolist() == payload.indices.tolist()
            assert torch.equal(received, row)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_messages_of_one_step_are_equally_long(encoding: str) -> None:
    """Peers never exchange lengths, so the length must not depend on which indices were taken."""
    sets = [list(range(40)), list(range(960, 1000)), list(range(0, 1000, 25))]
    lengths = {Wire(encoding).encode(payload_of(indices, 1000), torch.zeros(7)).numel() for indices in sets}
    assert len(lengths) == 1


# ---- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoding, k, n, index_bytes",
    [
        ("int32", 10, 1000, 40),
        ("bitmap", 10, 1000, 125),
        ("elias_fano", 10, 1000, 12),  # 6 low bits each are 8 bytes; 10 + 999 // 64 = 25 high bits are 4
        ("elias_fano", 1000, 1000, 250),  # no low bits; 1000 + 999 high bits
        ("elias_fano", 4, 40, 3),  # 3 low bits each are 2 bytes; 4 + 39 // 8 = 8 high bits just fit one
        ("elias_fano", 0, 1000, 0),
        ("elias_fano", 1, 1, 1),
    ],
)
def test_sizes_by_hand(encoding: str, k: int, n: int, index_bytes: int) -> None:
    assert INDEX_ENCODINGS[encoding].size(k, n) == index_bytes
    padded = -(-index_bytes // 4) * 4
    assert Wire(encoding).message_bytes(k, n, 5, shared=False) == 4 * k + 4 * 5 + padded


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 2**31 - 1), st.floats(0.0, 1.0))
@example(2**31 - 1, 1.0)
@example(8, 1.0)
def test_elias_fano_keeps_its_bound(n: int, density: float) -> None:
    """At most 2 + log2(n/k) bits an index, as the module says; its two parts end in a whole byte each."""
    k = max(1, math.floor(density * n))
    size = INDEX_ENCODINGS["elias_fano"].size(k, n)
    rounding = 1e-9 * k  # of log2 in double precision
    assert 8 * size <= k * (2 + math.log2(n / k)) + 2 * 7 + rounding


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 10**6), st.floats(0.0, 1.0), st.booleans())
def test_smallest_is_never_longer_than_any_encoding(n: int, density: float, shared: bool) -> None:
    k = math.floor(density * n)
    lengths = {name: Wire(name).message_bytes(k, n, 3, shared=shared) for name in ENCODINGS}
    assert lengths.pop("smallest") == min(lengths.values())


@pytest.mark.parametrize(
    "k, n, chosen",
    [
        (0, 8, "int32"),
        (1, 2**20, "int32"),  # 4 bytes either way: the first of equals
        (10**4, 10**6, "elias_fano"),
        (6 * 10**5, 10**6, "bitmap"),
    ],
)
def test_smallest_chooses_by_density(k: int, n: int, chosen: str) -> None:
    assert Wire("smallest").index_encoding(k, n) == chosen


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
def test_a_named_encoding_is_used_whatever_its_size(encoding: str) -> None:
    assert {Wire(encoding).index_encoding(k, 1000) for k in (0, 1, 500, 1000)} == {encoding}


def test_the_density_of_a_payload() -> None:
    assert payload_of([1, 5], 8).density == 0.25
    assert payload_of([], 0).density == 1.0  # nothing was left out
