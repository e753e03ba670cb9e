"""Everything is sent: the control of every compressor."""

from __future__ import annotations

import torch

from ..ops.reference import accumulate_
from ..payload import Form, Payload
from .base import Accumulation, Compressor, take_at_


class Identity(Compressor):
    """Takes all entries; its density is 1, so k is all of them. Nothing stays behind."""

    shared_indices = True

    def form(self, density: float, n: int) -> Form:
        return Form(n, n, shared=True)

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        accumulate_(residual, added)
        indices = torch.arange(residual.numel(), device=residual.device)
        return Payload(take_at_(residual, added, indices), indices.to(torch.int32), form)
