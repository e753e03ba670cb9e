"""The codecs' specification against plain Python, and the laws that every encoding keeps."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ops
from ops import reference
from ops.layout import INDEX_ENCODINGS, SCALED, VALUE_BITS, index_layout

FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 3.4028235e38, 1e-45, -3e-39, 1.2e-38, 6e-8, 3e-8]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    n = draw(st.integers(0, 300))
    return n, sorted(draw(st.sets(st.integers(0, n - 1)))) if n else []


def stream(parts: list[list[tuple[int, int]]]) -> bytes:
    """By hand: each part a list of (number, width), lowest bit first, padded to 4 bytes."""
    out = b""
    for part in parts:
        word, at = 0, 0
        for number, width in part:
            word |= number << at
            at += width
        out += word.to_bytes(4 * -(-at // 32), "little")
    return out


def by_hand(indices: list[int], n: int, encoding: str) -> bytes:
    if encoding == "int32":
        return struct.pack(f"<{len(indices)}i", *indices)
    if encoding == "bitmap":
        return stream([[(int(i in set(indices)), 1) for i in range(n)]])
    if not indices:
        return b""
    low = 0
    while 2 ** (low + 1) * len(indices) <= n:
        low += 1
    high = {(index >> low) + i for i, index in enumerate(indices)}
    length = len(indices) + ((n - 1) >> low)
    return stream([[(index % 2**low, low) for index in indices], [(int(p in high), 1) for p in range(length)]])


@settings(max_examples=200, deadline=None)
@given(case=index_sets(), encoding=st.sampled_from(["int32", "elias_fano", "bitmap"]))
def test_indices_are_written_as_documented(case: tuple[int, list[int]], encoding: str) -> None:
    n, listed = case
    indices = torch.tensor(listed, dtype=torch.int32)
    encoded = ops.encode_indices(indices, n, encoding)
    assert bytes(encoded.tolist()) == by_hand(listed, n, encoding)
    assert encoded.numel() == ops.index_bytes(encoding, len(listed), n)
    decoded = ops.decode_indices(encoded, len(listed), n, encoding)
    assert decoded.indices.tolist() == listed and int(decoded.corrupt) == 0


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 9000), k_c=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_chunk12_is_written_as_documented(n: int, k_c: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(min(4096, n - at), generator=g)[:k_c].sort().values for at in range(0, n, 4096)]
    inside = torch.cat([*rows, torch.empty(0, dtype=torch.int64)])
    indices = torch.cat([*(4096 * i + row for i, row in enumerate(rows)), torch.empty(0, dtype=torch.int64)]).int()
    encoded = ops.encode_indices(indices, n, "chunk12", k_c=k_c)
    assert bytes(encoded.tolist()) == stream([[(code, 12) for code in inside.tolist()]])
    decoded = ops.decode_indices(encoded, indices.numel(), n, "chunk12", k_c=k_c)
    assert torch.equal(decoded.indices, indices) and int(decoded.corrupt) == 0


@settings(max_examples=300, deadline=None)
@given(case=index_sets(), encoding=st.sampled_from(["int32", "elias_fano", "bitmap"]), data=st.data())
def test_what_decodes_is_what_would_be_encoded(case: tuple[int, list[int]], encoding: str, data: st.DataObject) -> None:
    """Any bytes: either corrupt, with 0..k-1 as indices, or exactly the encoding of the indices that come out."""
    n, listed = case
    k = len(listed)
    encoded = ops.encode_indices(torch.tensor(listed, dtype=torch.int32), n, encoding)
    if encoded.numel() == 0:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, encoded.numel() - 1))] ^= data.draw(st.integers(1, 255))
    indices, corrupt = reference.decode_indices(encoded, index_layout(encoding, k, n))
    if int(corrupt):
        assert indices.tolist() == list(range(k))
    else:
        assert torch.equal(ops.encode_indices(indices, n, encoding), encoded)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
def test_elias_fano_stays_near_the_entropy(density: float) -> None:
    """At most 1.1 times log2(1/density) + 1.44 bits an index, a sparse random subset's entropy."""
    n = 25_000_000
    k = round(n * density)
    assert 8 * ops.index_bytes("elias_fano", k, n) / k <= 1.1 * (math.log2(1 / density) + 1.44)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(FLOATS, max_size=300), dtype=st.sampled_from(list(VALUE_BITS)))
def test_values_are_rounded_as_documented(values: list[float], dtype: str) -> None:
    original = torch.tensor(values, dtype=torch.float32)
    lost = original.clone()
    encoded = ops.encode_values_(lost, dtype)
    assert encoded.numel() == ops.value_bytes(dtype, len(values))
    decoded = ops.decode_values(encoded, len(values), dtype)
    assert bool(decoded.isfinite().all())
    assert torch.equal(lost, original - decoded), "value - decoded, one subtraction"
    if dtype in SCALED:
        steps = {"int8": 127, "int4": 7, "int2": 1}[dtype]
        for start in range(0, len(values), 128):
            block = original[start : start + 128]
            scale = float(torch.tensor(min(float(block.abs().max()), float.fromhex("0x1.fffffcp+127"))) / steps)
            stored = struct.unpack_from("<f", bytes(encoded.tolist()), start // 32)[0]
            assert stored == (scale if scale >= 2.0**-126 else 0.0)
            levels = [-1, -1 / 3, 1 / 3, 1] if dtype == "int2" else range(-steps, steps + 1)
            # Half a step and the roundings of a division, a multiplication and the level, each 2^-24 of at most absmax.
            bound = max(b - a for a, b in zip(levels, levels[1:], strict=False)) / 2 * stored
            error = (block.double() - decoded[start : start + 128].double()).abs()
            limit = bound + 4 * 2.0**-24 * block.abs().max().double() if stored else block.abs().double()
            assert bool((error <= limit).all())


def test_halves_saturate_and_the_rest_stays() -> None:
    for dtype, largest in (("bf16", 3.3895313892515355e38), ("fp16", 65504.0)):
        values = torch.tensor([3.4028235e38, -3.4028235e38, 1.0, -0.0])
        decoded = ops.decode_values(ops.encode_values_(values, dtype), 4, dtype)
        assert decoded.tolist() == [largest, -largest, 1.0, 0.0] and math.copysign(1, decoded[3]) == -1
        assert values.tolist() == [float(torch.tensor(3.4028235e38)) - largest, largest - 3.4028234663852886e38, 0, 0]


@pytest.mark.parametrize("dtype", VALUE_BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_hide(dtype: str, bad: float) -> None:
    values = torch.ones(300)
    values[130] = bad
    decoded = ops.decode_values(ops.encode_values_(values, dtype), 300, dtype)
    spoilt = slice(128, 256) if dtype in SCALED else slice(130, 131)
    assert not bool(decoded[spoilt].isfinite().any()), "it arrives, and in a scaled dtype spoils its block"
    decoded[spoilt] = 1.0
    assert decoded.tolist() == [1.0] * 300, "and nothing else"
    assert dtype == "fp32" or bool(values[spoilt].isnan().all())


def test_int2_by_hand() -> None:
    values = torch.tensor([3.0, -3.0, 2.0, -2.1, 0.0, -0.0])
    encoded = ops.encode_values_(values, "int2")
    assert encoded.numel() == 8 and encoded[4:].tolist() == [0b11_00_11_01, 0b10_00, 0, 0]
    assert ops.decode_values(encoded, 6, "int2").tolist() == [3.0, -3.0, 1.0, -3.0, 1.0, -1.0]


@pytest.mark.parametrize("encoding", INDEX_ENCODINGS)
def test_a_message_is_built_and_read_in_place(encoding: str) -> None:
    """Slices of one buffer: nothing outside them changes, pads inside are zeros."""
    n, k_c = 5000, 7
    k = ops.chunked_count(n, k_c)
    indices = ops.chunked_topk_(torch.zeros(n), torch.randn(n), k_c).indices
    message = torch.full((10_000,), 0xAB, dtype=torch.uint8)
    values = torch.randn(k)
    at_values, at_indices = 12, 12 + ops.value_bytes("int4", k)
    end = at_indices + ops.index_bytes(encoding, k, n, k_c)
    written = ops.encode_values_(values, "int4", out=message[at_values:at_indices])
    assert written.data_ptr() == message[at_values:].data_ptr()
    ops.encode_indices(indices, n, encoding, k_c=k_c, out=message[at_indices:end])
    assert bool((message[:at_values] == 0xAB).all()) and bool((message[end:] == 0xAB).all())
    decoded = ops.decode_indices(message[at_indices:end], k, n, encoding, k_c=k_c)
    assert torch.equal(decoded.indices, indices)
