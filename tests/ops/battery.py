"""One comparison for all tiers: a case is an input, a tier is right when it equals the reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ops import reference
from ops.types import Accumulation, Selection, Tier

from .distributions import make

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """An input: what to accumulate and how."""

    distribution: str
    n: int
    grad: str = "fp32"
    decay: float = 1.0
    momentum: float | None = None
    device: str = "cpu"

    def build(self) -> tuple[Tensor, Accumulation]:
        residual = make(self.distribution, self.n, seed=1)
        grad = make(self.distribution, self.n, seed=2).to(DTYPES[self.grad])
        if self.distribution in ("constant", "zeros", "ties", "ascending", "sparse"):
            grad = torch.zeros_like(grad)  # the sum is to keep the shape that gives the distribution its name
        velocity = None if self.momentum is None else 0.1 * make(self.distribution, self.n, seed=3).to(self.device)
        return residual.to(self.device), Accumulation(grad.to(self.device), self.decay, self.momentum, velocity)


Call = Callable[[Tier, Tensor, Accumulation], Selection]


def same_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Bitwise, but for NaNs: their payload is no part of the contract."""
    if got.is_floating_point():
        got, expected = (torch.where(x.isnan(), torch.nan, x).view(torch.int32) for x in (got, expected))
    different = torch.nonzero(got.flatten() != expected.flatten()).flatten()
    if got.shape != expected.shape or different.numel():
        at = different[:5].tolist()
        raise AssertionError(f"{name} differs at {at} of {expected.numel()}: {got[different[:5]]}")


def assert_like_reference(tier: Tier, case: Case, call: Call) -> Selection:
    """Runs the call on the tier and on the reference and compares everything that the contract fixes."""
    expected_residual, expected_accumulation = case.build()
    expected = call(reference, expected_residual, expected_accumulation)
    residual, accumulation = case.build()
    got = call(tier, residual, accumulation)
    same_bits("indices", got.indices, expected.indices)
    same_bits("values", got.values, expected.values)
    same_bits("residual", residual, expected_residual)
    same_bits("threshold", got.threshold.reshape(1), expected.threshold.reshape(1))
    if accumulation.velocity is not None and expected_accumulation.velocity is not None:
        same_bits("velocity", accumulation.velocity, expected_accumulation.velocity)
    assert got.indices.dtype == torch.int32 and got.values.dtype == torch.float32
    return got


def ks_for(n: int) -> list[int]:
    """None, one, sparse, half, all."""
    return sorted({0, 1, max(1, n // 1000), max(1, n // 100), n // 2, n})


def topk(k: int) -> Call:
    return lambda tier, residual, accumulation: tier.topk_(residual, accumulation, k)


def mstopk(k: int, samplings: int, seed: int) -> Call:
    return lambda tier, residual, accumulation: tier.mstopk_(residual, accumulation, k, samplings, seed)


def chunked(k_c: int, chunk: int) -> Call:
    return lambda tier, residual, accumulation: tier.chunked_topk_(residual, accumulation, k_c, chunk)
