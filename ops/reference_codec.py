"""The codecs' specification, in torch: short enough to be checked by eye; every other tier must equal it bit for bit.

The layout of the bytes is in :mod:`.layout` and docs/kernels.md. Deterministic; any device; may wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import BLOCK, CHUNK_BITS, VALUE_BITS, IndexLayout, scale_bytes
from .types import MAGNITUDE_MASK, Decoded

INVALID_INDICES = "indices must ascend strictly within 0..{last}{chunks}; the encoded bytes are unspecified"
_INF_KEY = 0x7F800000
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HALF_NAN = {"bf16": 0x7FC0, "fp16": 0x7E00}
# What the largest code stands for, in scales.
_TOP = {"int8": 127.0, "int4": 7.0, "int2": 1.0}
# One step below the largest float: the scale may be rounded up, and the top code times it must not overflow.
_LARGEST_ABSMAX = float.fromhex("0x1.fffffcp+127")
_TWO_THIRDS = float.fromhex("0x1.555556p-1")  # 2/3 and 1/3, rounded to fp32
_THIRD = float.fromhex("0x1.555556p-2")
_SMALLEST_SCALE = 2.0**-126  # below, scales would be denormal: few bits, and slow on most processors


def invalid_indices(layout: IndexLayout) -> str:
    """What is said of indices that cannot be encoded."""
    chunks = f", {layout.k_c} in every chunk of 4096" if layout.encoding == "chunk12" else ""
    return INVALID_INDICES.format(last=layout.n - 1, chunks=chunks)


@torch.no_grad()
def encode_indices(indices: Tensor, layout: IndexLayout, out: Tensor) -> None:
    """1. fields: the low ``width`` bits of each index  2. bits: bit index (bitmap), or bit (index >> width) + i."""
    wide, count = indices.long(), torch.arange(layout.k, device=indices.device)
    sound = _ascending(wide, layout.n)
    if layout.encoding == "chunk12":
        sound = sound & (wide >> CHUNK_BITS == count // max(1, layout.k_c)).all()
    if not bool(sound):
        raise ValueError(invalid_indices(layout))
    if layout.encoding == "int32":
        out.copy_(indices.view(torch.uint8))
        return
    fields = wide[:, None] >> torch.arange(layout.width, device=indices.device) & 1
    bits = torch.zeros(layout.bits, dtype=torch.uint8, device=indices.device)
    if layout.bits:
        bits[wide if layout.encoding == "bitmap" else (wide >> layout.width) + count] = 1
    _pack(fields.flatten(), out[: layout.field_bytes])
    _pack(bits, out[layout.field_bytes :])


@torch.no_grad()
def decode_indices(encoded: Tensor, layout: IndexLayout) -> Decoded:
    """1. fields  2. positions of the set bits, which must be k  3. both together  4. check: pads, order, range."""
    k, width, count = layout.k, layout.width, torch.arange(layout.k, device=encoded.device)
    if layout.encoding == "int32":
        indices = encoded.view(torch.int32)
        sound = _ascending(indices, layout.n)
        return Decoded(torch.where(sound, indices, count.int()), (~sound).int())
    field_bits, bits = _unpack(encoded[: layout.field_bytes]), _unpack(encoded[layout.field_bytes :])
    sound = (field_bits[k * width :] == 0).all() & (bits[layout.bits :] == 0).all()
    weights = torch.arange(width, device=encoded.device)
    indices = (field_bits[: k * width].view(k, width).long() << weights).sum(1)
    if layout.bits:
        positions = bits[: layout.bits].nonzero().flatten()
        if positions.numel() != k:
            sound, positions = torch.zeros_like(sound), count
        indices += positions if layout.encoding == "bitmap" else (positions - count) << width
    elif layout.encoding == "chunk12":
        indices += count // max(1, layout.k_c) << CHUNK_BITS
    sound = sound & _ascending(indices, layout.n)
    return Decoded(torch.where(sound, indices, count).int(), (~sound).int())


@torch.no_grad()
def encode_values_(values: Tensor, dtype: str, out: Tensor) -> None:
    """Writes the bytes, then values -= what they decode to."""
    if dtype == "fp32":
        out.copy_(values.view(torch.uint8))
        values.zero_()
        return
    if dtype in _HALVES:
        largest = torch.finfo(_HALVES[dtype]).max
        rounded = torch.where(values.isinf(), values, values.clamp(-largest, largest))
        halves = rounded.to(_HALVES[dtype]).view(torch.int16)
        halves[values.isnan()] = _HALF_NAN[dtype]  # conversions differ in what they make of a NaN
        _write(halves.view(torch.uint8), out)
    else:
        scales, codes = _quantize(values, dtype)
        _write(scales.view(torch.uint8), out[: scale_bytes(dtype, values.numel())])
        shifts = torch.arange(VALUE_BITS[dtype], device=values.device, dtype=torch.int32)
        _pack((codes[:, None] >> shifts & 1).flatten(), out[scale_bytes(dtype, values.numel()) :])
    values.sub_(decode_values(out, values.numel(), dtype))


@torch.no_grad()
def decode_values(encoded: Tensor, k: int, dtype: str) -> Tensor:
    """fp32 as it is, halves widened (exact), codes times the scale of their block (one fp32 multiplication)."""
    if dtype == "fp32":
        return encoded.view(torch.float32).clone()
    if dtype in _HALVES:
        return encoded.view(_HALVES[dtype])[:k].float()
    width, start = VALUE_BITS[dtype], scale_bytes(dtype, k)
    bits = _unpack(encoded[start:])[: k * width].view(k, width).int()
    codes = (bits << torch.arange(width, device=encoded.device, dtype=torch.int32)).sum(1, dtype=torch.int32)
    scales = encoded[:start].view(torch.float32).repeat_interleave(BLOCK)[:k]
    return _levels(codes, dtype) * scales


def _quantize(values: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Scales fp32 [ceil(k / 128)] and codes int32 [k], each in its VALUE_BITS lowest bits.

    scale = min(absmax, 0x1.fffffcp+127) / 127, / 7 or / 1, rounded once; 0 when that is below 2^-126.
    int8, int4: code = value / scale (rounded once), to the nearest integer, halves to even; two's complement.
    int2: bit 1 is the sign bit; bit 0 is set when |value| > scale * 0x1.555556p-1 (rounded once).
    A block with a NaN or Inf has the scale NaN (0x7fc00000); where the scale is 0 or NaN, codes are 0.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    absmax = (blocks.view(torch.int32) & MAGNITUDE_MASK).amax(1) if values.numel() else blocks.new_empty(0).int()
    scales = absmax.view(torch.float32).clamp_max(_LARGEST_ABSMAX) / _TOP[dtype]
    scales = torch.where(scales < _SMALLEST_SCALE, 0.0, scales)
    scales = torch.where(absmax >= _INF_KEY, torch.nan, scales)
    if dtype == "int2":
        codes = (blocks.view(torch.int32) < 0).int() * 2 + (blocks.abs() > scales[:, None] * _TWO_THIRDS).int()
    else:
        codes = torch.round(blocks / scales[:, None])
    codes = torch.where(scales[:, None] > 0, codes, 0).int() & ((1 << VALUE_BITS[dtype]) - 1)
    return scales, codes.flatten()[: values.numel()]


def _levels(codes: Tensor, dtype: str) -> Tensor:
    """What a code stands for, in scales; int2: 0, 1, 2, 3 are 1/3 (0x1.555556p-2), 1, -1/3, -1."""
    if dtype == "int2":
        return torch.tensor([_THIRD, 1.0, -_THIRD, -1.0], device=codes.device)[codes]
    sign = 1 << (VALUE_BITS[dtype] - 1)
    return ((codes ^ sign) - sign).float()


def _ascending(indices: Tensor, n: int) -> Tensor:
    """bool []: strictly ascending within 0..n-1."""
    return (indices[1:] > indices[:-1]).all() & (indices >= 0).all() & (indices < n).all()


def _write(data: Tensor, out: Tensor) -> None:
    out[: data.numel()] = data
    out[data.numel() :] = 0


def _pack(bits: Tensor, out: Tensor) -> None:
    """Integers in {0, 1} to bytes, first bit least significant, filled up with zeros."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, 8 * out.numel() - bits.numel())).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    out.copy_((padded * weights).sum(1, dtype=torch.uint8))


def _unpack(packed: Tensor) -> Tensor:
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten()
