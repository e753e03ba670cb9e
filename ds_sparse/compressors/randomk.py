"""Random entries, the same ones on every peer."""

from __future__ import annotations

import numpy as np
import torch

from ..ops.reference import accumulate_
from ..payload import Form, Payload
from .base import Accumulation, Compressor, take_at_


class RandomK(Compressor):
    """One random entry out of each of k equal runs, from a seed that all peers share: no index is sent.

    Each entry has the same chance, k/n to rounding. The draw is made on the CPU, so that it does not depend on the
    kind of device. Values are not rescaled by n/k: with error feedback, what is not sent now is sent later.

    Args:
        seed: of the stream; step t draws from a generator seeded by (seed, t).
    """

    shared_indices = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        accumulate_(residual, added)
        indices = self._draw(form.numel, form.k, step).to(residual.device)
        return Payload(take_at_(residual, added, indices), indices.to(torch.int32), form)

    def _draw(self, n: int, k: int, step: int) -> torch.Tensor:
        """Ascending int64 [k] in [0, n)."""
        seed = int(np.random.SeedSequence((self._seed, step)).generate_state(1)[0])
        edges = torch.arange(k + 1) * n // k
        runs = edges[1:] - edges[:-1]
        fraction = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return edges[:-1] + (fraction * runs).long()
