"""SparseStream: a sequence of vectors whose mean over nodes is sent compressed, with error feedback."""

from __future__ import annotations

import torch

from ..compressors import Quota, build_compressor
from ..config import SECTION
from ..costs import dense_bytes
from ..errors import SlowerThanDenseError
from ..exchange import DenseExchange, Exchange, choose_exchange
from ..fallback import Change, Fallback, Stopwatch
from ..feedback import ErrorFeedback, Offer
from ..schedule import DensitySchedule
from .base import Context


class SparseStream:
    """The part that all sparsifying methods share.

    One step of it, on the vector of this node (Karimireddy et al. 2019, Algorithm 2, on a shard):

     1. add the vector to the residual, take k entries out of it
     2. exchange them, together with the excluded entries, for the mean over nodes

    Attributes:
        feedback: what was not sent yet.
        fallback: sends everything instead while that is faster; None where nothing is compressed or it is "off".
    """

    def __init__(self, context: Context) -> None:
        config, layout = context.config, context.layout
        self._context = context
        self._compressor = build_compressor(config.compressor)
        self._schedule = DensitySchedule(config.schedule, config.compressor.final_density)
        self._dense = DenseExchange(context.peers)
        self._exchanges = {density: self._choose(density) for density in self._schedule.densities}
        owns = any(exchange is not None and exchange.owns for exchange in self._exchanges.values())
        self.feedback = ErrorFeedback(layout, context.device, config.error_feedback, owns=owns)
        tries = config.fallback != "off" and context.peers.size > 1
        self.fallback = Fallback(self._mean_over_ranks) if tries else None

    def compresses(self, step: int) -> bool:
        """Whether compressed step `step` may leave anything out, on any rank: nothing here looks at this shard."""
        return self._context.peers.size > 1 and self._schedule.density(step) < 1.0

    def mean_(self, vector: torch.Tensor, step: int) -> float:
        """Replaces `vector` fp32 [numel] by the mean of what the nodes sent of it; returns the density.

        Raises:
            SlowerThanDenseError: that was measured, and `fallback` is "error".
        """
        density = self._schedule.density(step)
        self._context.peers.stats.ask(density)
        if self.fallback is None or density != self._schedule.final:
            return self._mean_at_(density, vector, step)
        stopwatch = Stopwatch(vector.device)
        achieved = self.mean_all_(vector) if self.fallback.next_is_dense else self._mean_at_(density, vector, step)
        seconds = stopwatch.stop()
        if isinstance(self._exchanges[density], DenseExchange | None):
            seconds = float  # 0.0: this rank sends everything anyway, and has no say
        if change := self.fallback.record(seconds):
            self._tell(change)
        return achieved

    def _mean_over_ranks(self, seconds: tuple[float, float]) -> tuple[float, float]:
        """In whole nanoseconds, whose sum is the same in any order."""
        total = torch.tensor([round(1e9 * one) for one in seconds], device=self._context.device)
        for link in (self._context.node, self._context.peers):
            link.sum_(total)
        compressed, dense = (total * 1e-9 / (self._context.node.size * self._context.peers.size)).tolist()
        return compressed, dense

    def _tell(self, change: Change) -> None:
        measured = (
            f"compressed communication takes {1e3 * change.compressed_seconds:.3g} ms a step here, dense "
            f"{1e3 * change.dense_seconds:.3g} ms"
        )
        if change.to_dense and self._context.config.fallback == "error":
            raise SlowerThanDenseError(
                f"'{SECTION}.fallback' is 'error' and {measured}. What to do: lower compressor.density, leave "
                f"compression off, or set fallback to 'dense' or 'off'."
            )
        self._context.notes.append(
            f"{measured}: from the next step on everything is sent dense, and compression is tried again later"
            if change.to_dense
            else f"{measured}: from the next step on it is sent compressed again"
        )

    def _mean_at_(self, density: float, vector: torch.Tensor, step: int) -> float:
        exchange, quota = self._exchanges[density], self._quota(density)
        if exchange is None:
            return self.mean_all_(vector)
        if not exchange.owns:
            self.feedback.disown_()
        vector[quota.numel :] = self.feedback.take_dense_(vector[quota.numel :])
        # 1. and 2.: the exchange takes what it sends.
        offer = Offer(self.feedback, quota, vector[: quota.numel], step)
        exchange.mean_(offer, vector)
        return offer.taken / quota.numel

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
        exchange, quota = self._exchanges[self._schedule.final], self._quota(self._schedule.final)
        if exchange is None:
            return dense_bytes(layout.numel, self._context.peers.size)
        return exchange.cost(quota, layout.dense_numel).sent

    def _quota(self, density: float) -> Quota:
        return Quota(self._compressor, density, self._context.layout.sparse_numel)

    def _choose(self, density: float) -> Exchange | None:
        """The exchange at a density; None where sending everything is the better or the only choice."""
        context, quota = self._context, self._quota(density)
        if quota.numel == 0 or context.peers.size == 1:
            return None
        exchange, reason = choose_exchange(
            context.config, context.peers, context.node.size, quota, context.layout.dense_numel
        )
        if reason and quota.whole.density < 1.0:  # whoever asks for everything need not be told that it is dense
            context.notes.append(reason)
        return exchange
