"""Payloads are expanded and all-reduced: the control of the sparse exchanges, with the same result."""

from __future__ import annotations

import torch

from ..compressors import Quota
from ..costs import Cost, dense_cost
from ..feedback import Offer
from .base import Exchange


class DenseExchange(Exchange):
    """A ring all-reduce of the whole shard in fp32; its cost does not depend on the density."""

    def mean_(self, offer: Offer, vector: torch.Tensor) -> None:
        with self._time("select"):
            payload = offer.take_(offer.whole)
        with self._time("encode"):
            region = vector[offer.whole].zero_()
            region[payload.indices.long()] = payload.values
        self.mean_all_(vector)

    def mean_all_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over peers of a whole vector fp32 [numel], in place."""
        with self._time("exchange"):
            self._peers.sum_(tensor)
        return tensor.div_(self._peers.size)

    def cost(self, quota: Quota, excluded: int) -> Cost:
        return dense_cost(quota.numel + excluded, self._peers.size)
