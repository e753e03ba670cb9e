"""From payloads to their mean, the same bits on every peer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..links import Link
from ..payload import Payload


class Exchange(ABC):
    """Averages over peers.

    Args:
        peers: link to the ranks that own the same shard on the other nodes.
    """

    def __init__(self, peers: Link) -> None:
        self._peers = peers

    @abstractmethod
    def mean_(self, payload: Payload, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the mean over peers into `out`.

        Args:
            payload: what this rank sends of the compressed region.
            dense: fp32 [dense_numel], this rank's excluded entries.
            out: fp32 [payload.numel + dense_numel]; overwritten. Bitwise the same on all peers afterwards.
        """

    @abstractmethod
    def wire_bytes(self, k: int, n: int, dense_numel: int, *, shared: bool) -> int:
        """Bytes that a rank sends for k of n entries and `dense_numel` excluded ones."""


def dense_bytes(numel: int, peers: int) -> int:
    """Bytes that a rank sends for a dense fp32 ring all-reduce of `numel` elements over `peers` ranks."""
    return 2 * (peers - 1) * 4 * numel // peers
