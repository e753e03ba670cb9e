"""Exact top-k: the k largest magnitudes, ties to the lowest index."""

from __future__ import annotations

import torch

from .. import ops
from ..payload import Form, Payload
from .base import Accumulation, Compressor


class TopK(Compressor):
    """Accumulation and selection in one kernel call (docs/kernels.md)."""

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        chosen = ops.ef_topk_(
            residual, added.grad, form.k, decay=added.decay, momentum=added.momentum, velocity=added.velocity
        )
        return Payload(chosen.values, chosen.indices, form)
