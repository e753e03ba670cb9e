"""Random entries, the same ones on every peer."""

from __future__ import annotations

import torch

from ..ops.reference import accumulate_
from ..payload import Payload
from .base import Accumulation, Compressor, take_at_


class RandomK(Compressor):
    """k entries drawn without replacement from a seed that all peers share: no index is sent.

    The draw is made on the CPU, so that it does not depend on the kind of device. Values are not rescaled by n/k:
    with error feedback, what is not sent now is sent later.

    Args:
        seed: of the stream; step t draws from a generator seeded by (seed, t).
    """

    shared_indices = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def take_(self, residual: torch.Tensor, added: Accumulation, k: int, step: int) -> Payload:
        accumulate_(residual, added)
        generator = torch.Generator().manual_seed((self._seed << 32) + step)
        drawn = torch.randperm(residual.numel(), generator=generator)[:k].sort().values
        indices = drawn.to(residual.device)
        return Payload(take_at_(residual, added, indices), indices.to(torch.int32), residual.numel(), shared=True)
