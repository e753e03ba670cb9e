"""Payload: what one node sends of a shard. Form: the shape of it, which all peers know beforehand."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Form(NamedTuple):
    """All that has to be known of a payload to tell the length of its message.

    Attributes:
        k: entries.
        numel: entries that could have been selected.
        shared: every peer selects the same indices, so that they need not be sent.
        k_c: entries of every `ops.CHUNK` elements, where that many are selected of each; else None.
    """

    k: int
    numel: int
    shared: bool = False
    k_c: int | None = None

    @property
    def density(self) -> float:
        return self.k / self.numel if self.numel else 1.0


class Payload(NamedTuple):
    """Selected entries of a region.

    Attributes:
        values: fp32 [form.k].
        indices: int32 [form.k], distinct, ascending, in [0, form.numel).
    """

    values: torch.Tensor
    indices: torch.Tensor
    form: Form
