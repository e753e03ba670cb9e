"""The public calls of the codecs: indices and values of a payload to bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor, int32, uint8

from . import layout
from .checks import MAX_ELEMENTS, check_device, check_int, check_name, check_vector
from .layout import INDEX_ENCODINGS, VALUE_BITS, IndexLayout, index_layout
from .tiers import tier_of
from .types import CHUNK, Decoded, chunked_count

__all__ = ["decode_indices", "decode_values", "encode_indices", "encode_values_", "index_bytes", "value_bytes"]


def index_bytes(encoding: str, k: int, n: int, k_c: int | None = None) -> int:
    """Exact length in bytes, a multiple of 4, of k encoded indices below n.

    Args:
        encoding: "int32", "elias_fano", "bitmap" or "chunk12".
        k: number of indices, 0..n.
        n: indices lie in 0..n-1; n < 2^31.
        k_c: for "chunk12" only: entries of every 4096 elements, as given to :func:`chunked_topk_`; k must be
            ``chunked_count(n, k_c)``. The other encodings ignore it.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed.
    """
    return _layout(encoding, k, n, k_c).total_bytes


def encode_indices(
    indices: Tensor, n: int, encoding: str, *, k_c: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Strictly ascending indices below n as bytes.

    Args:
        indices: int32 [k], contiguous, strictly ascending, each in 0..n-1; for "chunk12" k_c of every chunk of 4096
            and min(k_c, rest) of a last, shorter one.
        n, encoding, k_c: as in :func:`index_bytes`.
        out: uint8 [index_bytes], contiguous, its memory aligned to 4 bytes: a part of a message to write into.

    Returns:
        Tensor: uint8 [index_bytes]; ``out`` where it was given. The same bytes on every tier.

    Raises:
        TypeError, ValueError: as :func:`index_bytes`; also, on the CPU, for indices that do not ascend or lie outside
            (``out`` is then unspecified). On CUDA such indices end in a device-side trap, which the next
            synchronisation reports; the call does not wait for the device.
    """
    check_vector("indices", indices, (int32,))
    parts = _layout(encoding, indices.numel(), n, k_c)
    out = _output(out, parts.total_bytes, "indices", indices)
    tier_of(indices).encode_indices(indices, parts, out)
    return out


def decode_indices(encoded: Tensor, k: int, n: int, encoding: str, *, k_c: int | None = None) -> Decoded:
    """The inverse of :func:`encode_indices`, safe on any bytes.

    Args:
        encoded: uint8 [index_bytes], contiguous, its memory aligned to 4 bytes; may be a slice of a message.
        k, n, encoding, k_c: as in :func:`index_bytes`.

    Returns:
        Decoded: the indices, and a flag that is 1 when the bytes are not what :func:`encode_indices` writes for any
        k ascending indices below n. The indices are then 0..k-1, so that nothing done with them can go out of bounds.
        The same on every tier. On CUDA the call does not wait for the device.

    Raises:
        TypeError, ValueError: as :func:`index_bytes`; for a wrong length of ``encoded``.
    """
    parts = _layout(encoding, k, n, k_c)
    _check_bytes("encoded", encoded, parts.total_bytes)
    return tier_of(encoded).decode_indices(encoded, parts)


def value_bytes(dtype: str, k: int) -> int:
    """Exact length in bytes, a multiple of 4, of k encoded values.

    Args:
        dtype: "fp32", "bf16", "fp16", "int8", "int4" or "int2".
        k: number of values.
    """
    check_name("dtype", dtype, tuple(VALUE_BITS))
    check_int("k", k, 0, MAX_ELEMENTS)
    return layout.value_bytes(dtype, k)


def encode_values_(values: Tensor, dtype: str, *, out: Tensor | None = None) -> Tensor:
    """Round values to ``dtype``, write them as bytes and leave in ``values`` what rounding lost.

    Args:
        values: fp32 [k], contiguous; afterwards value - decoded value, one fp32 subtraction each. For "fp32", which
            loses nothing, that is +0 everywhere, whatever the values were.
        dtype: as in :func:`value_bytes`. "bf16" and "fp16" round to nearest even; finite values beyond the range become
            the largest finite one. "int8", "int4", "int2" share a scale among 128 consecutive values; a block whose
            scale would be below 2^-126 is sent as zeros.
        out: uint8 [value_bytes], contiguous, its memory aligned to 4 bytes: a part of a message to write into.

    Returns:
        Tensor: uint8 [value_bytes]; ``out`` where it was given. The same bytes on every tier.
        Inf stays Inf and NaN NaN in the float dtypes, and what they lost is NaN; in the scaled ones a block that holds
        either decodes to NaN throughout.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed; nothing was changed.
    """
    check_vector("values", values)
    length = value_bytes(dtype, values.numel())
    out = _output(out, length, "values", values)
    tier_of(values).encode_values_(values.detach(), dtype, out)
    return out


def decode_values(encoded: Tensor, k: int, dtype: str) -> Tensor:
    """The inverse of :func:`encode_values_`: fp32 [k] with memory of its own. Any bytes decode to something.

    Args:
        encoded: uint8 [value_bytes], contiguous, its memory aligned to 4 bytes; may be a slice of a message.
        k, dtype: as in :func:`value_bytes`.
    """
    _check_bytes("encoded", encoded, value_bytes(dtype, k))
    return tier_of(encoded).decode_values(encoded, k, dtype)


def _layout(encoding: str, k: int, n: int, k_c: int | None) -> IndexLayout:
    check_name("encoding", encoding, INDEX_ENCODINGS)
    check_int("n", n, 0, MAX_ELEMENTS)
    check_int("k", k, 0, n, "n")
    if encoding == "chunk12":
        if k_c is None:
            raise ValueError("encoding 'chunk12' needs k_c: the entries of every chunk of 4096, as in chunked_topk_")
        check_int("k_c", k_c, 0, CHUNK)
        if k != (count := chunked_count(n, k_c)):
            raise ValueError(f"encoding 'chunk12' writes exactly {count} indices for n={n} and k_c={k_c}, got k={k}")
    return index_layout(encoding, k, n, k_c)


def _output(out: Tensor | None, length: int, of: str, source: Tensor) -> Tensor:
    if out is None:
        return torch.empty(length, dtype=uint8, device=source.device)
    _check_bytes("out", out, length)
    check_device("out", out, of, source)
    return out


def _check_bytes(name: str, tensor: Tensor, length: int) -> None:
    check_vector(name, tensor, (uint8,))
    if tensor.numel() != length:
        raise ValueError(f"{name} must have exactly {length} bytes here, got {tensor.numel()}")
    if tensor.data_ptr() % 4:
        raise ValueError(f"{name} must start at a multiple of 4 bytes in memory, got address {tensor.data_ptr():#x}")
