"""Link: a process group together with the bytes this rank sends over it.

Every collective of this package goes through a `Link`, so that bytes are counted on the line that sends them. The
counts are those of the ring algorithms that gloo and NCCL use for large tensors.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from .accounting import CommStats

# torch 2.13 renamed these collectives; the old names warn there and the new ones are missing before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Link:
    """Collectives over one group of ranks. With a single rank every call is a local no-op that sends nothing.

    Args:
        group: process group.
        kind: "inter" when the ranks are on different nodes, "intra" when they share one.
    """

    def __init__(self, group: Any, kind: Literal["inter", "intra"], stats: CommStats) -> None:
        self._group, self._kind, self._stats = group, kind, stats
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes the sum over the ranks, bitwise the same on each of them."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
            self._count(2 * (self.size - 1) * tensor.nbytes // self.size)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather of equally long 1-d tensors: [size, numel], row r from rank r."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        out = tensor.new_empty(self.size * tensor.numel())
        _all_gather(out, tensor.contiguous(), group=self._group)
        self._count((self.size - 1) * tensor.nbytes)
        return out.view(self.size, tensor.numel())

    def sum_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter: this rank's 1/size of the sum. `tensor` is 1-d, its length a multiple of size."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty(tensor.numel() // self.size)
        _reduce_scatter(out, tensor, group=self._group)
        self._count((self.size - 1) * out.nbytes)
        return out

    def _count(self, sent: int) -> None:
        self._stats.count_bytes(self._kind, sent)
