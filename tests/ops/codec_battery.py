"""One comparison of the codecs for all tiers: the bytes, what they decode to, and what is said of corrupt ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from ops import reference
from ops.layout import IndexLayout, index_layout, value_bytes
from ops.types import CHUNK, Tier

from .battery import same_bits
from .distributions import MAKERS

LARGEST = (1 << 31) - 1
# k and n: nothing, all, one, words that are just full and just not, the largest n, density 1/4 and 1/1000.
SIZES = (
    (0, 0), (0, 100), (1, 1), (1, 100), (31, 31), (32, 32), (33, 64), (100, 100), (3, LARGEST), (257, LARGEST),
    (999, 1000), (5003, 20_011), (30, 30_000),
)  # fmt: skip
CHUNKED_SIZES = ((0, 5000), (1, 1), (1, 4096), (41, 4095), (41, 20_011), (4096, 8200))  # k_c and n


def extremes(n: int, g: Generator) -> Tensor:
    """Runs of 64 of one size each, from the least denormal to the largest float: scales that under- and overflow."""
    exponents = torch.randint(-149, 128, ((n + 63) // 64,), generator=g).repeat_interleave(64)[:n]
    exponents[::400] = 127
    return torch.ldexp(2 - torch.rand(n, generator=g).double() ** 40, exponents).float().clamp(-FLOAT_MAX, FLOAT_MAX)


def nans(n: int, g: Generator) -> Tensor:
    """NaNs of all payloads and both signs: none of that is sent, one NaN is."""
    return (
        (torch.randint(0x7F800001, 1 << 31, (n,), generator=g) - (torch.arange(n) % 2 << 31)).int().view(torch.float32)
    )


def halfway(n: int, g: Generator) -> Tensor:
    """Halfway between two neighbours of fp16 (even places) and of bf16 (odd ones), which decides how ties round."""
    bits = torch.randint(0x39000000, 0x46000000, (n,), generator=g)
    return (
        torch.where(torch.arange(n) % 2 == 0, bits & ~0x1FFF | 0x1000, bits & ~0xFFFF | 0x8000)
        .int()
        .view(torch.float32)
    )


FLOAT_MAX = torch.finfo(torch.float32).max
VALUE_MAKERS = {**MAKERS, "extremes": extremes, "nans": nans, "halfway": halfway}
VALUE_COUNTS = (0, 1, 2, 7, 127, 128, 129, 1000, 4099)


def layouts(longest: int = LARGEST) -> Iterator[IndexLayout]:
    """Every encoding at every size; a bitmap of 2^31 bits is left to those who have the time."""
    for encoding in ("int32", "elias_fano", "bitmap"):
        for k, n in SIZES:
            if n <= longest and (encoding != "bitmap" or n < 1 << 20):
                yield index_layout(encoding, k, n)
    for k_c, n in CHUNKED_SIZES:
        if n <= longest:
            yield index_layout("chunk12", n // CHUNK * k_c + min(k_c, n % CHUNK), n, k_c)


def random_indices(layout: IndexLayout, g: Generator) -> Tensor:
    """int32 [k]: a random subset of 0..n-1 that the layout can encode."""
    k, n = layout.k, layout.n
    if layout.encoding == "chunk12":
        rows = [at + _subset(layout.k_c, min(CHUNK, n - at), g) for at in range(0, n, CHUNK)]
        return torch.cat(rows).int() if rows else torch.empty(0, dtype=torch.int32)
    return _subset(k, n, g).int()


def _subset(k: int, n: int, g: Generator) -> Tensor:
    if n < 1 << 20:
        return torch.randperm(n, generator=g)[:k].sort().values
    return torch.cat([torch.randint(0, n - 1, (4 * k,), generator=g).unique()[: k - 1], torch.tensor([n - 1])])


def subsets(layout: IndexLayout, g: Generator) -> Iterator[Tensor]:
    """Random, and, where the layout leaves the choice, all at the front, all at the end and one run amid."""
    yield random_indices(layout, g)
    if layout.encoding != "chunk12":
        run = torch.arange(layout.k, dtype=torch.int32)
        for start in sorted({0, layout.n - layout.k, (layout.n - layout.k) // 2}):
            yield run + start


def damaged(encoded: Tensor, g: Generator, rounds: int) -> Iterator[Tensor]:
    """Bytes that were hurt on the way: flipped bits, a lost end, a shifted start, noise, all zeros, all ones."""
    size = encoded.numel()
    if size == 0:
        return
    for _ in range(rounds):
        flipped = encoded.clone()
        at = torch.randint(0, size, (1 + int(torch.randint(0, 3, (1,), generator=g)),), generator=g)
        flipped[at] ^= (1 << torch.randint(0, 8, at.shape, generator=g)).to(torch.uint8)
        yield flipped
        cut = encoded.clone()
        cut[int(torch.randint(0, size, (1,), generator=g)) :] = 0
        yield cut
        yield encoded.roll(int(torch.randint(1, 9, (1,), generator=g)))
        yield torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8)
    yield torch.zeros_like(encoded)
    yield torch.full_like(encoded, 255)


def in_message(part: Tensor, words_before: int = 3) -> Tensor:
    """The same bytes at an address that is a multiple of 4 and not of 8, between others."""
    message = torch.full((4 * words_before + part.numel() + 64,), 0xAB, dtype=torch.uint8, device=part.device)
    message[4 * words_before :][: part.numel()] = part
    return message[4 * words_before :][: part.numel()]


def assert_indices_like_reference(tier: Tier, layout: IndexLayout, g: Generator, rounds: int = 2) -> None:
    """Encodes and decodes subsets, sound and damaged, on the tier and on the reference."""
    for indices in subsets(layout, g):
        expected = torch.empty(layout.total_bytes, dtype=torch.uint8)
        reference.encode_indices(indices, layout, expected)
        got = in_message(torch.full_like(expected, 0xCD))
        tier.encode_indices(indices, layout, got)
        same_bits(f"bytes of {layout}", got, expected)
        for encoded in (expected, *damaged(expected, g, rounds)):
            theirs = reference.decode_indices(encoded, layout)
            ours = tier.decode_indices(in_message(encoded), layout)
            same_bits(f"corrupt, of {layout}", ours.corrupt.reshape(1), theirs.corrupt.reshape(1))
            same_bits(f"indices of {layout}", ours.indices, theirs.indices)
            assert ours.indices.dtype == torch.int32 and ours.corrupt.shape == ()


def assert_values_like_reference(tier: Tier, name: str, k: int, dtype: str) -> None:
    """Encodes, compares bytes and losses, and decodes the bytes and random ones."""
    size = value_bytes(dtype, k)
    theirs, ours = (VALUE_MAKERS[name](k, Generator().manual_seed(4)) for _ in range(2))
    expected = torch.empty(size, dtype=torch.uint8)
    reference.encode_values_(theirs, dtype, expected)
    got = in_message(torch.full_like(expected, 0xCD))
    tier.encode_values_(ours, dtype, got)
    if dtype == "fp32":
        got, expected = got.view(torch.float32), expected.view(torch.float32)
    same_bits(f"{dtype} bytes of {name}", got, expected)
    same_bits(f"what {dtype} lost of {name}", ours, theirs)
    noise = torch.randint(0, 256, (size,), generator=Generator().manual_seed(k), dtype=torch.uint8)
    for encoded in (expected.view(torch.uint8), noise):
        decoded = tier.decode_values(in_message(encoded), k, dtype)
        same_bits(f"decoded {dtype} of {name}", decoded, reference.decode_values(encoded, k, dtype))
