"""Everything is sent: the control of every compressor."""

from __future__ import annotations

import torch

from ..ops.reference import accumulate_
from ..payload import Payload
from .base import Accumulation, Compressor, take_at_


class Identity(Compressor):
    """Takes all entries; its density is 1, so k is all of them. Nothing stays behind."""

    shared_indices = True

    def take_(self, residual: torch.Tensor, added: Accumulation, k: int, step: int) -> Payload:
        accumulate_(residual, added)
        indices = torch.arange(residual.numel(), device=residual.device)
        return Payload(take_at_(residual, added, indices), indices.to(torch.int32), residual.numel(), shared=True)
