"""Inputs that break selections: each maker returns fp32 [n] from a generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor


def gaussian(n: int, g: Generator) -> Tensor:
    return torch.randn(n, generator=g)


def heavy_tails(n: int, g: Generator) -> Tensor:
    """Student-like ratio of Gaussians: a few entries thousands of times the median."""
    return torch.randn(n, generator=g) / torch.randn(n, generator=g).abs().clamp_min(1e-4)


def constant(n: int, g: Generator) -> Tensor:
    return torch.full((n,), -0.75)


def zeros(n: int, g: Generator) -> Tensor:
    """Both zeros: -0 and +0 are one magnitude."""
    return torch.where(torch.rand(n, generator=g) < 0.5, 0.0, -0.0)


def ties(n: int, g: Generator) -> Tensor:
    """Five magnitudes only, so that the k-th has many equals."""
    return torch.randint(-4, 5, (n,), generator=g).float()


def non_finite(n: int, g: Generator) -> Tensor:
    """NaN and both infinities among Gaussians (one NaN pattern: payloads are no part of the contract)."""
    x = torch.randn(n, generator=g)
    kind = torch.rand(n, generator=g)
    x[kind < 0.02] = torch.nan
    x[(kind >= 0.02) & (kind < 0.04)] = torch.inf
    x[(kind >= 0.04) & (kind < 0.06)] = -torch.inf
    return x


def denormals(n: int, g: Generator) -> Tensor:
    magnitudes = torch.randint(0, 1 << 22, (n,), generator=g, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.rand(n, generator=g) < 0.5, magnitudes, -magnitudes)


def one_outlier(n: int, g: Generator) -> Tensor:
    """What throws a bisection by value off: one entry 1e30 times the others."""
    x = torch.randn(n, generator=g)
    if n:
        x[n // 2] = 1e30
    return x


def sparse(n: int, g: Generator) -> Tensor:
    """99 % zeros, in whole rows."""
    x = torch.randn(n, generator=g)
    return x * (torch.rand((n + 63) // 64, generator=g) < 0.01).float().repeat_interleave(64)[:n]


def ascending(n: int, g: Generator) -> Tensor:
    """Every entry beats the k best so far: candidate buffers overflow all the time."""
    return torch.arange(1, n + 1, dtype=torch.float32)


def descending(n: int, g: Generator) -> Tensor:
    return torch.arange(n, 0, -1, dtype=torch.float32)


def block_at_the_end(n: int, g: Generator) -> Tensor:
    """All the large entries side by side, where a sample easily misses them."""
    x = torch.randn(n, generator=g) * 1e-3
    x[n - n // 50 :] += 10.0
    return x


MAKERS: dict[str, Callable[[int, Generator], Tensor]] = {
    maker.__name__: maker
    for maker in (
        gaussian, heavy_tails, constant, zeros, ties, non_finite, denormals, one_outlier, sparse, ascending, descending,
        block_at_the_end,
    )
}  # fmt: skip


def make(name: str, n: int, seed: int = 0) -> Tensor:
    return MAKERS[name](n, torch.Generator().manual_seed(seed))
