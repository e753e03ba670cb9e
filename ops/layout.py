"""Where the parts of encoded indices and values stand, and how long they are; docs/kernels.md has the layout in full.

Every part is a little-endian stream of bits, the first bit the least significant of the first byte, and is padded with
zero bits to a multiple of 4 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

INDEX_ENCODINGS = ("int32", "elias_fano", "bitmap", "chunk12")
VALUE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}
SCALED = ("int8", "int4", "int2")  # dtypes with one fp32 scale a block
BLOCK = 128  # values that share a scale
CHUNK_BITS = 12  # chunk12 numbers the elements of a chunk of 4096


class IndexLayout(NamedTuple):
    """k ascending indices below n as two parts, either of which may be empty: fields, then a bit vector.

    The fields are k numbers of ``width`` bits, the low bits of the indices. The bit vector has ``bits`` bits of which
    k are set: index i sets bit i (bitmap), or its number plus what stands above its field (Elias-Fano).
    """

    encoding: str
    k: int
    n: int
    width: int
    bits: int
    k_c: int = 0  # chunk12: entries a chunk

    @property
    def field_bytes(self) -> int:
        return padded_bytes(self.k * self.width)

    @property
    def total_bytes(self) -> int:
        return self.field_bytes + padded_bytes(self.bits)


def index_layout(encoding: str, k: int, n: int, k_c: int | None = None) -> IndexLayout:
    """The layout of k of n indices; arguments as :func:`ops.index_bytes`, already checked."""
    if encoding == "int32":
        return IndexLayout(encoding, k, n, 32, 0)
    if encoding == "bitmap":
        return IndexLayout(encoding, k, n, 0, n)
    if encoding == "chunk12":
        return IndexLayout(encoding, k, n, CHUNK_BITS, 0, k_c or 0)
    if k == 0:
        return IndexLayout(encoding, 0, n, 0, 0)
    low = (n // k).bit_length() - 1  # floor(log2(n / k))
    return IndexLayout(encoding, k, n, low, k + ((n - 1) >> low))


def padded_bytes(bits: int) -> int:
    return 4 * -(-bits // 32)


def scale_bytes(dtype: str, k: int) -> int:
    """Length of the scales, which stand before the codes."""
    return 4 * -(-k // BLOCK) if dtype in SCALED else 0


def value_bytes(dtype: str, k: int) -> int:
    """As :func:`ops.value_bytes`, of arguments already checked."""
    return scale_bytes(dtype, k) + padded_bytes(k * VALUE_BITS[dtype])
