"""Level2: what happens to a node's shard at an accumulation boundary, whoever hands it over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .accounting import CommStats
from .costs import dense_bytes
from .errors import ExchangeError
from .links import Link, LinkError
from .methods import METHODS, Context


class Outcome(NamedTuple):
    """What the optimizer's side has to know of a boundary.

    Attributes:
        finite: false when some rank had a non-finite gradient: the step must be skipped, nothing was changed.
        grad_norm: the estimated global gradient norm when the gradient was clipped here; None when clipping is left
            to the optimizer's side.
    """

    finite: bool
    grad_norm: float | None = None


class Level2:
    """One shard, one method, and the steps around it that all methods share.

    Args:
        context: what the method is built from.
        others: links to ranks that hold other parameters of the same model (tensor parallelism).
        clip_norm: bound on the global gradient norm; 0 for none.
        stats: the counters that the links of `context` count into.
        step: the optimizer step under way, as the user counts them.
    """

    def __init__(
        self, context: Context, others: Sequence[Link], clip_norm: float, stats: CommStats, step: Callable[[], int]
    ) -> None:
        self.layout, self.device, self.stats = context.layout, context.device, stats
        self._peers, self.clip_norm, self._step = context.peers, clip_norm, step
        self._last_square_sum = torch.zeros((), device=context.device)  # of the last finite gradient on this shard
        self._links = (context.node, context.peers, *others)
        self.dense_bytes = dense_bytes(context.layout.numel, context.peers.size)
        self._name = context.config.method
        self.method = METHODS[context.config.method](context)
        self.planned_bytes = self.method.planned_bytes()  # also finds settings that no exchange can serve

    def exchange_(self, shard: torch.Tensor) -> Outcome:
        """Replaces the node's mean gradient by what the optimizer shall see.

        1. All ranks agree on whether every gradient is finite.
        2. The node's gradient is clipped, when what is sent next is compressed.
        3. The method exchanges.

        Args:
            shard: fp32 [layout.numel], unscaled; unchanged when the outcome is not finite.

        Raises:
            ExchangeError: other ranks did not answer. The shard, and what is kept from step to step, are then of no
                use: go on from a checkpoint.
        """
        with self.naming_failures():
            return self._exchange_(shard)

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Turns the failure of a link within the block into an `ExchangeError` that says what was under way."""
        try:
            yield
        except LinkError as failure:
            raise ExchangeError(
                f"method '{self._name}' at step {self._step()} {failure}. What to do: look for the first error "
                f"on those nodes and at their links, then go on from the last checkpoint; see docs/faults.md."
            ) from failure.__cause__

    def _exchange_(self, shard: torch.Tensor) -> Outcome:
        started = time.perf_counter()
        finite, square_sum = self._agree(shard)
        grad_norm = None
        density = self.stats.total.density
        fallback = self.method.fallback is not None and self.method.fallback.dense
        if finite:
            if self.method.begin_step():
                grad_norm = self._clip_(shard, square_sum)
            density = self.method.exchange_(shard)
        self.stats.close(
            exchanged=finite,
            dense_bytes=self.dense_bytes if finite else 0,
            seconds=time.perf_counter() - started,
            density=density,
            fallback=finite and fallback,
        )
        return Outcome(finite, grad_norm)

    def _agree(self, shard: torch.Tensor) -> tuple[bool, float]:
        """Whether the gradient is finite on all ranks, and the sum of its squares over all ranks."""
        square_sum = self._square_sum(shard)
        if not torch.isfinite(square_sum):  # a large finite gradient may overflow its square
            square_sum = torch.where(shard.isfinite().all(), torch.finfo(torch.float32).max / 1e6, math.nan)
        agreed = square_sum.reshape(1).clone()
        for link in self._links:
            link.sum_(agreed)
        total = float(agreed)
        finite = math.isfinite(total)
        if finite:
            self._last_square_sum = square_sum
        return finite, total

    def grad_norm(self) -> float:
        """L2 norm, before clipping, of this shard of the node's mean gradient at the last step that was not skipped."""
        return math.sqrt(float(self._last_square_sum))

    def _square_sum(self, shard: torch.Tensor) -> torch.Tensor:
        """Of the entries that count in norms; not finite where any entry is not (0 times infinity is not a number)."""
        segments = self.layout.segments
        if all(segment.counted for segment in segments):
            return torch.dot(shard, shard)
        pairs = zip(segments, self.layout.views(shard), strict=True)
        return torch.stack([torch.dot(part, part) * float(segment.counted) for segment, part in pairs]).sum()

    def _clip_(self, shard: torch.Tensor, square_sum: float) -> float:
        """Scales the shard by the same factor on all ranks; returns the estimated norm of the mean gradient.

        The mean gradient is not at hand. Where the nodes' gradients differ by noise, as they do in training with
        small batches, its norm is the root mean square of theirs over the square root of the number of nodes
        (DGC, Lin et al. 2018, section 3.3).
        """
        norm = math.sqrt(square_sum) / self._peers.size
        if 0.0 < self.clip_norm < norm:
            shard.mul_(self.clip_norm / norm)
        return norm
