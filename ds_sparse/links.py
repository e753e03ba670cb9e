"""Link: a process group together with the bytes this rank sends over it.

Every collective of this package goes through a `Link`, so that bytes are counted on the line that sends them. The
counts are those of the ring algorithms that gloo and NCCL use for large tensors.

Collectives whose name starts with `start_` run in the background: on gloo's own threads, on NCCL's own stream. All of
one group run in the order in which they were started, which must be the same on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from .accounting import CommStats

# torch 2.13 renamed these collectives; the old names warn there and the new ones are missing before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Flight:
    """A collective under way."""

    _result: torch.Tensor
    _work: Any = None

    def wait(self) -> torch.Tensor:
        """The result. On a GPU it is torch's current stream that waits, not the caller."""
        if self._work is not None:
            self._work.wait()
        return self._result


class Link:
    """Collectives over one group of ranks. With a single rank every call is a local no-op that sends nothing.

    Args:
        group: process group.
        kind: "inter" when the ranks are on different nodes, "intra" when they share one.
        stats: what the bytes are counted into.
    """

    def __init__(self, group: Any, kind: Literal["inter", "intra"], stats: CommStats) -> None:
        self._group, self._kind, self.stats = group, kind, stats
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes the sum over the ranks, bitwise the same on each of them."""
        return self.start_sum_(tensor).wait()

    def start_sum_(self, tensor: torch.Tensor) -> Flight:
        """`sum_` in the background; `tensor` must be left alone until then."""
        if self.size == 1 or not tensor.numel():
            return Flight(tensor)
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size)
        return Flight(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather of equally long 1-d tensors: [size, numel], row r from rank r."""
        return self.start_gather(tensor).wait()

    def start_gather(self, tensor: torch.Tensor) -> Flight:
        """`gather` in the background."""
        if self.size == 1:
            return Flight(tensor.unsqueeze(0))
        out = tensor.new_empty(self.size, tensor.numel())
        self._count((self.size - 1) * tensor.nbytes)
        return Flight(out, _all_gather(out.view(-1), tensor.contiguous(), group=self._group, async_op=True))

    def sum_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter: this rank's 1/size of the sum. `tensor` is 1-d, its length a multiple of size."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty(tensor.numel() // self.size)
        _reduce_scatter(out, tensor, group=self._group)
        self._count((self.size - 1) * out.nbytes)
        return out

    def deal(self, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """All-to-all: part r of each rank goes to rank r.

        Args:
            parts: 1-d, one for each rank, of one dtype and any lengths.
            lengths: elements that each rank sends to this one.

        Returns:
            What each rank sent, as slices of one buffer.
        """
        if self.size == 1:
            return list(parts)
        sent = torch.cat(list(parts))
        out = sent.new_empty(sum(lengths))
        dist.all_to_all_single(out, sent, list(lengths), [part.numel() for part in parts], group=self._group)
        self._count(sent.nbytes - parts[self.rank].nbytes)
        return list(out.split(list(lengths)))

    def _count(self, sent: int) -> None:
        self.stats.count_bytes(self._kind, sent)
