"""Link: a process group together with the bytes this rank sends over it.

Every collective of this package goes through a `Link`, so that bytes are counted on the line that sends them. The
counts are those of the ring algorithms that gloo and NCCL use for large tensors.

Collectives whose name starts with `start_` run in the background: on gloo's own threads, on NCCL's own stream. All of
one group run in the order in which they were started, which must be the same on all of its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from .accounting import CommStats

# torch 2.13 renamed these collectives; the old names warn there and the new ones are missing before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class LinkError(RuntimeError):
    """A collective failed because other ranks did not answer; says which. `Level2` turns it into an `ExchangeError`."""


@contextmanager
def waiting_for(others: Callable[[], str]) -> Iterator[None]:
    """Turns what gloo or NCCL raise within the block into a `LinkError`, which says who the `others` are."""
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception of its own: it raises the base class, and names its source file.
        if not (isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))):
            raise
        seconds = time.monotonic() - started
        raise LinkError(f"got no answer from {others()} after {seconds:.1f} s: {error}") from error


@dataclass(frozen=True)
class Flight:
    """A collective under way; `_others` names the ranks that take part in it."""

    _result: torch.Tensor
    _works: Sequence[Any] = ()
    _others: Callable[[], str] = str

    def wait(self) -> torch.Tensor:
        """The result. On a GPU it is torch's current stream that waits, not the caller."""
        with waiting_for(self._others):
            for work in self._works:
                work.wait()
        return self._result


class Link:
    """Collectives over one group of ranks. With a single rank every call is a local no-op that sends nothing.

    Args:
        group: process group.
        kind: "inter" when the ranks are on different nodes, "intra" when they share one.
        stats: what the bytes are counted into.
        names: where each global rank runs, for error messages.

    Raises:
        LinkError: of every collective, when other ranks did not answer.
    """

    def __init__(
        self, group: Any, kind: Literal["inter", "intra"], stats: CommStats, names: Mapping[int, str] | None = None
    ) -> None:
        self._group, self._kind, self.stats, self._names = group, kind, stats, names or {}
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        # gloo passes a gather around a ring and makes an all-reduce of a reduce-scatter: between all pairs at once they
        # take a third of the time.
        self._pairwise = self.size > 1 and dist.get_backend(group) == dist.Backend.GLOO

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: `tensor` becomes the sum over the ranks, bitwise the same on each of them."""
        return self.start_sum_(tensor).wait()

    def start_sum_(self, tensor: torch.Tensor) -> Flight:
        """`sum_` in the background; `tensor` must be left alone until then."""
        if self.size == 1 or not tensor.numel():
            return Flight(tensor)
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self._start(tensor, lambda: [dist.all_reduce(tensor, group=self._group, async_op=True)])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather of equally long 1-d tensors: [size, numel], row r from rank r."""
        return self.start_gather(tensor).wait()

    def start_gather(self, tensor: torch.Tensor) -> Flight:
        """`gather` in the background; `tensor` must be left alone until then."""
        if self.size == 1:
            return Flight(tensor.unsqueeze(0))
        tensor = tensor.contiguous()
        out = tensor.new_empty(self.size, tensor.numel())
        self._count((self.size - 1) * tensor.nbytes)
        if self._pairwise:
            return self._start(out, lambda: self._swap([tensor] * self.size, list(out)))
        return self._start(out, lambda: [_all_gather(out.view(-1), tensor, group=self._group, async_op=True)])

    def sum_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter: this rank's 1/size of the sum. `tensor` is 1-d, its length a multiple of size."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty(tensor.numel() // self.size)
        self._count((self.size - 1) * out.nbytes)
        if not self._pairwise:
            with waiting_for(self.others):
                _reduce_scatter(out, tensor, group=self._group)
            return out
        parts = tensor.new_empty(self.size, out.numel())
        self._start(out, lambda: self._swap(list(tensor.view(self.size, -1)), list(parts))).wait()
        out.copy_(parts[0])
        for part in parts[1:]:  # in the order of the ranks
            out += part
        return out

    def deal(self, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """All-to-all: part r of each rank goes to rank r.

        Args:
            parts: 1-d and contiguous, one for each rank, of one dtype and any lengths.
            lengths: elements that each rank sends to this one.

        Returns:
            What each rank sent.
        """
        if self.size == 1:
            return list(parts)
        received = [parts[0].new_empty(length) for length in lengths]
        self._count(sum(part.nbytes for part in parts) - parts[self.rank].nbytes)
        if self._pairwise:
            self._start(parts[0], lambda: self._swap(parts, received)).wait()
        else:
            with waiting_for(self.others):
                dist.all_to_all(received, list(parts), group=self._group)
        return received

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Any]:
        """Starts to send `sent[r]` to each rank r, and to receive `received[r]` from it."""
        received[self.rank].copy_(sent[self.rank])
        works = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if received[source].numel():
                works.append(dist.irecv(received[source], self._global(source), self._group))
            if sent[to].numel():
                works.append(dist.isend(sent[to], self._global(to), self._group))
        return works

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def others(self) -> str:
        """Names the other ranks of the group."""
        ranks = [rank for rank in dist.get_process_group_ranks(self._group) if rank != dist.get_rank()]
        return ", ".join(self._names.get(rank, f"rank {rank}") for rank in ranks)

    def _start(self, result: torch.Tensor, collective: Callable[[], list[Any]]) -> Flight:
        with waiting_for(self.others):
            return Flight(result, collective(), self.others)

    def _count(self, sent: int) -> None:
        self.stats.count_bytes(self._kind, sent)
