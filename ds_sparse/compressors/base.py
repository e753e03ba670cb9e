"""The one thing a compressor does: take entries out of an accumulator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..ops.types import Accumulation
from ..payload import Payload


class Compressor(ABC):
    """Stateless: all that outlives a step is the accumulator, which `ErrorFeedback` owns."""

    shared_indices = False  # whether all peers take the same entries at the same step

    @abstractmethod
    def take_(self, residual: torch.Tensor, added: Accumulation, k: int, step: int) -> Payload:
        """Accumulates `added` into `residual`, then moves k entries from `residual` into a payload.

        Conservation: payload + residual after == what was accumulated, bitwise.

        Args:
            residual: fp32 [n], contiguous; changed in place: the entries taken are 0 afterwards. The velocity, where
                there is one, becomes 0 at the same places (DGC's factor masking).
            added: the new vector [n] and how it enters (decay, momentum).
            k: entries to take, 1 <= k <= n.
            step: the same number on all ranks; seeds whatever is random.
        """


def take_at_(residual: torch.Tensor, added: Accumulation, indices: torch.Tensor) -> torch.Tensor:
    """Values fp32 [k] of `residual` at int64 `indices` [k]; leaves zeros there, and in the velocity."""
    values = residual[indices]
    residual[indices] = 0.0
    if added.velocity is not None:
        added.velocity[indices] = 0.0
    return values
