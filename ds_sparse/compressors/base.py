"""The one thing a compressor does: take entries out of an accumulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..ops.types import Accumulation
from ..payload import Form, Payload


class Compressor(ABC):
    """Stateless: all that outlives a step is the accumulator, which `ErrorFeedback` owns."""

    shared_indices = False  # whether all peers take the same entries at the same step

    def form(self, density: float, n: int) -> Form:
        """What is taken of n entries: at least one, at most all; rounded up, so that the density is reached."""
        k = min(n, max(1, -(-round(density * n * 1e6) // 1_000_000)))
        return Form(k, n, self.shared_indices)

    @abstractmethod
    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        """Accumulates `added` into `residual`, then moves entries from `residual` into a payload.

        Conservation: payload + residual after == what was accumulated, bitwise.

        Args:
            residual: fp32 [n], contiguous; changed in place: the entries taken are 0 afterwards. The velocity, where
                there is one, becomes 0 at the same places (DGC's factor masking).
            added: the new vector [n] and how it enters (decay, momentum).
            form: of the payload, as `form` gave it for n entries.
            step: the same number on all ranks; seeds whatever is random.
        """


@dataclass(frozen=True)
class Quota:
    """What may be sent at one step: known before the gradient is, and to all peers."""

    compressor: Compressor
    density: float
    numel: int

    def form(self, region: slice) -> Form:
        """Of the payload for a part of the shard."""
        return self.compressor.form(self.density, region.stop - region.start)

    @property
    def whole(self) -> Form:
        return self.form(slice(0, self.numel))


def take_at_(residual: torch.Tensor, added: Accumulation, indices: torch.Tensor) -> torch.Tensor:
    """Values fp32 [k] of `residual` at int64 `indices` [k]; leaves zeros there, and in the velocity."""
    values = residual[indices]
    residual[indices] = 0.0
    if added.velocity is not None:
        added.velocity[indices] = 0.0
    return values
