"""Payload: what one node sends of a shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Payload:
    """Selected entries of a compressed region with `numel` entries.

    Attributes:
        values: fp32 [k].
        indices: int32 [k], distinct, ascending, in [0, numel).
        numel: entries that could have been selected.
        shared: every peer selected the same indices, so that they need not be sent.
    """

    values: torch.Tensor
    indices: torch.Tensor
    numel: int
    shared: bool = False

    @property
    def density(self) -> float:
        return self.values.numel() / self.numel if self.numel else 1.0
