"""SparseStream: a sequence of vectors whose mean over nodes is sent compressed, with error feedback."""

from __future__ import annotations

import torch

from ..compressors import build_compressor
from ..exchange import DenseExchange, Exchange, choose_exchange, dense_bytes
from ..feedback import ErrorFeedback
from ..schedule import DensitySchedule, entries
from .base import Context


class SparseStream:
    """The part that all sparsifying methods share.

    One step of it, on the vector of this node (Karimireddy et al. 2019, Algorithm 2, on a shard):

     1. add the vector to the residual, take k entries out of it
     2. exchange them, together with the excluded entries, for the mean over nodes
    """

    def __init__(self, context: Context) -> None:
        config = context.config
        self._context = context
        self._compressor = build_compressor(config.compressor)
        self._schedule = DensitySchedule(config.schedule, config.compressor.final_density)
        self._dense = DenseExchange(context.peers)
        self._chosen: dict[int, Exchange | None] = {}
        self.feedback = ErrorFeedback(context.layout, context.device, config.error_feedback)

    def compresses(self, step: int) -> bool:
        """Whether compressed step `step` may leave anything out, on any rank: nothing here looks at this shard."""
        return self._context.peers.size > 1 and self._schedule.density(step) < 1.0

    def mean_(self, vector: torch.Tensor, step: int) -> float:
        """Replaces `vector` fp32 [numel] by the mean of what the nodes sent of it; returns the density."""
        numel, k = self._context.layout.sparse_numel, self._entries(step)
        exchange = self._exchange(k)
        if exchange is None:
            return self.mean_all_(vector)
        # 1. Accumulate and select.
        payload = self.feedback.take_(self._compressor, vector[:numel], k, step)
        # 2. Exchange.
        exchange.mean_(payload, self.feedback.take_dense_(vector[numel:]), out=vector)
        return payload.density

    def mean_all_(self, vector: torch.Tensor) -> float:
        """Sends everything, what was kept from earlier steps included; nothing is kept afterwards."""
        numel = self._context.layout.sparse_numel
        vector[:numel] = self.feedback.take_all_(vector[:numel])
        vector[numel:] = self.feedback.take_dense_(vector[numel:])
        self._dense.mean_all_(vector)
        return 1.0

    def planned_bytes(self) -> int:
        """Bytes this rank sends at each step at the final density."""
        layout = self._context.layout
        k = entries(self._schedule.final, layout.sparse_numel) if layout.sparse_numel else 0
        exchange = self._exchange(k)
        if exchange is None:
            return dense_bytes(layout.numel, self._context.peers.size)
        shared = self._compressor.shared_indices
        return exchange.wire_bytes(k, layout.sparse_numel, layout.dense_numel, shared=shared)

    def _entries(self, step: int) -> int:
        numel = self._context.layout.sparse_numel
        return entries(self._schedule.density(step), numel) if numel else 0

    def _exchange(self, k: int) -> Exchange | None:
        """The exchange for k entries; None where sending everything is the better or the only choice."""
        if k not in self._chosen:
            self._chosen[k] = self._choose(k)
        return self._chosen[k]

    def _choose(self, k: int) -> Exchange | None:
        config, layout, peers = self._context.config, self._context.layout, self._context.peers
        if k == 0 or peers.size == 1:
            return None
        exchange, reason = choose_exchange(
            config.exchange, config.fallback, peers, k, layout.sparse_numel, layout.dense_numel,
            shared=self._compressor.shared_indices,
        )  # fmt: skip
        if reason and k < layout.sparse_numel:  # whoever asks for everything need not be told that it is dense
            self._context.notes.append(reason)
        return exchange
