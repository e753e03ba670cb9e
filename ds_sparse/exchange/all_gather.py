"""Every peer gets every payload (HiTopKComm, Shi et al. 2021, Algorithm 2, step 3)."""

from __future__ import annotations

import torch

from .. import ops
from ..links import Link
from ..payload import Payload
from ..wire import Wire
from .base import Exchange


class AllGatherExchange(Exchange):
    """One message a peer; its cost grows with the number of nodes: (m - 1) messages sent by each rank."""

    def __init__(self, peers: Link, wire: Wire) -> None:
        super().__init__(peers)
        self._wire = wire

    def mean_(self, payload: Payload, dense: torch.Tensor, out: torch.Tensor) -> None:
        # 1. Encode, 2. gather one message from each peer.
        messages = self._peers.gather(self._wire.encode(payload, dense))
        # 3. Decode and sum in peer order, so that float rounding is the same on every peer.
        out.zero_()
        sparse_out, dense_out = out[: payload.numel], out[payload.numel :]
        for message in messages:
            values, indices, peer_dense = self._wire.decode(message, own=payload)
            ops.scatter_add_(sparse_out, indices, values)
            dense_out += peer_dense
        # 4. Mean.
        out.div_(self._peers.size)

    def wire_bytes(self, k: int, n: int, dense_numel: int, *, shared: bool) -> int:
        return (self._peers.size - 1) * self._wire.message_bytes(k, n, dense_numel, shared=shared)
