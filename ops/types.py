"""What the calls take and return; shared by every tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from .layout import IndexLayout

MAGNITUDE_MASK = 0x7FFFFFFF  # fp32 bits without the sign: as integers they order like the magnitudes
NAN_KEY = 0x7F800001  # every NaN counts as this one, whatever its payload: above Inf, and ties among NaNs
CHUNK = 4096  # default chunk of chunked_topk_, elements


class Selection(NamedTuple):
    """The emitted entries of one selection, and two figures for monitoring.

    ``threshold`` and ``candidates`` are 0-d tensors on the device of the values, so that reading them (and
    with it the wait for the device) is the caller's decision.
    """

    values: Tensor  # fp32 [k], with sign, in the order of the indices
    indices: Tensor  # int32 [k], strictly ascending
    threshold: Tensor  # fp32 []; see the call that made the selection
    candidates: Tensor  # int64 []; entries that were looked at twice: a measure of work, not of the result


class Decoded(NamedTuple):
    """Decoded indices, and whether the bytes were sound; both on the device of the bytes, nothing waits for it."""

    indices: Tensor  # int32 [k], strictly ascending, in 0..n-1
    corrupt: Tensor  # int32 []; 1: the bytes encode no such indices, and 0..k-1 stand in for them; else 0


@dataclass(frozen=True)
class Accumulation:
    """What is added to the residual before the selection; see :func:`ops.reference.accumulate_`."""

    grad: Tensor  # fp32, bf16 or fp16 [n]
    decay: float = 1.0
    momentum: float | None = None
    velocity: Tensor | None = None  # fp32 [n]; present exactly when momentum is


class Tier(Protocol):
    """One implementation of the kernels. Arguments were checked by the public calls."""

    def topk_(self, residual: Tensor, accumulation: Accumulation | None, k: int) -> Selection: ...

    def mstopk_(
        self, residual: Tensor, accumulation: Accumulation | None, k: int, samplings: int, seed: int
    ) -> Selection: ...

    def chunked_topk_(self, residual: Tensor, accumulation: Accumulation | None, k_c: int, chunk: int) -> Selection: ...

    def scatter_add_(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def encode_indices(self, indices: Tensor, layout: IndexLayout, out: Tensor) -> None: ...

    def decode_indices(self, encoded: Tensor, layout: IndexLayout) -> Decoded: ...

    def encode_values_(self, values: Tensor, dtype: str, out: Tensor) -> None: ...

    def decode_values(self, encoded: Tensor, k: int, dtype: str) -> Tensor: ...


def chunked_count(n: int, k_c: int, chunk: int = CHUNK) -> int:
    """Entries that ``chunked_topk_`` emits for n elements: k_c a chunk, all of a last chunk shorter than k_c."""
    return n // chunk * k_c + min(k_c, n % chunk)


def band_start(seed: int, starts: int) -> int:
    """A start in 0..starts-1 from a seed: the same integer arithmetic on every device (splitmix64, high bits)."""
    wide = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & wide
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wide
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wide
    z ^= z >> 31
    return ((z >> 32) * starts) >> 32
