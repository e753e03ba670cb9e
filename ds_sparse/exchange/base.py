"""From payloads to their mean, the same bits on every peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal

import torch

from .. import ops
from ..compressors import Quota
from ..costs import Cost
from ..feedback import Offer
from ..links import Link
from ..payload import Payload
from ..wire import Wire


class Exchange(ABC):
    """Averages over peers.

    Args:
        peers: link to the ranks that own the same shard on the other nodes.
    """

    owns = False  # whether `ErrorFeedback.owned` is needed

    def __init__(self, peers: Link) -> None:
        self._peers = peers

    def _time(self, part: Literal["select", "encode", "exchange", "decode"]) -> AbstractContextManager[None]:
        """Counts the time of a block as a part of this boundary's."""
        return self._peers.stats.time(part)

    @abstractmethod
    def mean_(self, offer: Offer, vector: torch.Tensor) -> None:
        """Replaces this rank's vector by the mean over peers of what was sent.

        Args:
            offer: of the leading, compressed region, which is `vector[offer.whole]`.
            vector: fp32 [numel]; behind the compressed region stand the excluded entries, all of which are sent.
                Bitwise the same on all peers afterwards.
        """

    @abstractmethod
    def cost(self, quota: Quota, excluded: int) -> Cost:
        """Of one exchange of what `quota` allows and `excluded` entries."""


class SparseExchange(Exchange):
    """Sends messages of selected entries, and all-reduces the excluded ones meanwhile."""

    def __init__(self, peers: Link, wire: Wire) -> None:
        super().__init__(peers)
        self._wire = wire

    def mean_(self, offer: Offer, vector: torch.Tensor) -> None:
        flight = self._peers.start_sum_(vector[offer.whole.stop :])
        self._mean_payloads_(offer, vector[offer.whole])
        with self._time("exchange"):
            summed = flight.wait()
        summed.div_(self._peers.size)

    @abstractmethod
    def _mean_payloads_(self, offer: Offer, out: torch.Tensor) -> None:
        """Writes the mean of the payloads into `out`, which is the offer's vector."""

    def _add_mean_(self, out: torch.Tensor, payload: Payload) -> None:
        """Adds a payload's share of the mean to `out`."""
        ops.scatter_add_(out, payload.indices, payload.values.div_(self._peers.size))
