"""Top-k of every chunk: the same number of entries everywhere."""

from __future__ import annotations

import torch

from .. import ops
from ..payload import Form, Payload
from .base import Accumulation, Compressor


class ChunkedTopK(Compressor):
    """The k_c largest magnitudes of every `ops.CHUNK` consecutive entries (SparseLoCo, Sarfi et al. 2025, section 3).

    No layer is left out, however small its gradient; and 12 bits hold an index.
    """

    def form(self, density: float, n: int) -> Form:
        k_c = min(ops.CHUNK, max(1, round(density * ops.CHUNK)))
        return Form(ops.chunked_count(n, k_c), n, k_c=k_c)

    def take_(self, residual: torch.Tensor, added: Accumulation, form: Form, step: int) -> Payload:
        assert form.k_c is not None
        chosen = ops.chunked_topk_(
            residual, added.grad, form.k_c, decay=added.decay, momentum=added.momentum, velocity=added.velocity
        )
        return Payload(chosen.values, chosen.indices, form)
