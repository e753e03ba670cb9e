"""The gradient crosses nodes, sparse, with error feedback."""

from __future__ import annotations

import torch

from .base import Context, Method
from .stream import SparseStream


class SparseGradient(Method):
    """HiTopKComm (Shi et al. 2021, Algorithm 2) with error feedback, for SGD with momentum.

    The momentum belongs into the error feedback (`error_feedback.momentum`, DGC), not into the optimizer: momentum of
    a sparse stream weighs an entry by when it was released, not by when it was computed.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stream = SparseStream(context)
        self._dense_steps = context.config.schedule.dense_steps
        self.feedback, self.fallback = self._stream.feedback, self._stream.fallback

    def begin_step(self) -> bool:
        return self.exchanged >= self._dense_steps and self._stream.compresses(self.exchanged - self._dense_steps)

    def planned_bytes(self) -> int:
        return self._stream.planned_bytes()

    def _exchange_(self, shard: torch.Tensor) -> float:
        if self.exchanged < self._dense_steps:
            return self._stream.mean_all_(shard)
        return self._stream.mean_(shard, self.exchanged - self._dense_steps)
