"""Payloads are expanded and all-reduced: the control of the sparse exchanges, with the same result."""

from __future__ import annotations

import torch

from ..payload import Payload
from .base import Exchange, dense_bytes


class DenseExchange(Exchange):
    """A ring all-reduce of the whole shard in fp32; its cost does not depend on the density."""

    def mean_(self, payload: Payload, dense: torch.Tensor, out: torch.Tensor) -> None:
        out[: payload.numel].zero_()
        out[payload.indices.long()] = payload.values
        out[payload.numel :] = dense
        self.mean_all_(out)

    def mean_all_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over peers of a whole vector fp32 [numel], in place."""
        return self._peers.sum_(tensor).div_(self._peers.size)

    def wire_bytes(self, k: int, n: int, dense_numel: int, *, shared: bool) -> int:
        return dense_bytes(n + dense_numel, self._peers.size)
