"""MSTopK as the paper writes it: a threshold search by repeated counting."""

from __future__ import annotations

import torch

from .. import ops
from ..payload import Form, Payload
from .base import Accumulation, Compressor


class MSTopK(Compressor):
    """Approximate top-k (Shi et al. 2021, Algorithm 1): all entries above the tightest threshold that lets at most k
    through, filled up to k with a contiguous run, from a random start, of the entries just below it.

    `mstopk` without `samplings` is exact and faster on every device (docs/kernels.md); this one is for comparison
    with the paper.

    Args:
        samplings: thresholds tried, N in the paper.
        seed: of the random start; step t starts from (seed, t).
    """

    def __init__(self, samplings: int, seed: int) -> None:
        self._samplings, self._seed = samplings, seed

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        chosen = ops.mstopk_(
            residual, form.k, samplings=self._samplings, seed=(self._seed << 32) + step,
            grad=added.grad, decay=added.decay, momentum=added.momentum, velocity=added.velocity,
        )  # fmt: skip
        return Payload(chosen.values, chosen.indices, form)
