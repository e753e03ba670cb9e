"""Method: what crosses nodes. A method sees flat fp32 shards and two links, nothing of DeepSpeed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config import CommunicationConfig
from ..costs import dense_bytes
from ..fallback import Fallback
from ..feedback import ErrorFeedback
from ..links import Link
from ..shard import ShardLayout


class AdamState(Protocol):
    """What `sparse_momentum` needs of the Adam that steps on the shard."""

    @property
    def betas(self) -> tuple[float, float]: ...

    @property
    def lr(self) -> float: ...

    @property
    def frozen(self) -> bool:
        """Whether the variance stands still and gradients are taken for first moments."""

    def freeze(self) -> list[str]:
        """Freezes the variance; returns the names of parameters that had no gradient so far."""

    def first_moment(self) -> torch.Tensor:
        """A copy of the bias-corrected first moment, fp32 [numel] in the order of the shard."""

    def variance_norm(self) -> float:
        """L1 norm of the bias-corrected second moment over all shards; the same bits on all ranks. A collective."""


@dataclass
class Context:
    """All that a method is built from.

    Attributes:
        layout: of the shard.
        device: of the shard.
        peers: link to the same shard on the other nodes.
        node: link to the other shards of this node.
        adam: the optimizer's state; None unless the optimizer is an Adam.
        notes: what the user should be told once, filled by the method.
    """

    config: CommunicationConfig
    layout: ShardLayout
    device: torch.device
    peers: Link
    node: Link
    adam: AdamState | None
    notes: list[str]


class Method(ABC):
    """State of one shard across steps.

    Attributes:
        feedback: the error-feedback state, or None for a method that loses nothing.
        fallback: what switches the method to dense while that is faster, or None.
        exchanged: exchanges so far; steps skipped for a non-finite gradient do not count.
    """

    feedback: ErrorFeedback | None = None
    fallback: Fallback | None = None

    def __init__(self, context: Context) -> None:
        self._context = context
        self.exchanged = 0

    def begin_step(self) -> bool:
        """Whether the exchange that follows may send less than everything. Called once before each.

        The same answer on all ranks, also where this rank's shard has nothing to compress.

        The caller then clips the node's gradient before the exchange: the norm of a sparse stream, which releases in
        one step what gathered over many, says nothing about the gradient.
        """
        return False

    def exchange_(self, shard: torch.Tensor) -> float:
        """Replaces the node's mean gradient fp32 [numel] by what the optimizer shall see; returns the density.

        Bitwise the same on all peers afterwards.
        """
        density = self._exchange_(shard)
        self.exchanged += 1
        return density

    @abstractmethod
    def _exchange_(self, shard: torch.Tensor) -> float: ...

    def planned_bytes(self) -> int:
        """Bytes this rank will send across nodes at each step once everything has settled."""
        return dense_bytes(self._context.layout.numel, self._context.peers.size)

    def reset(self) -> None:
        """Forgets what was not sent."""
        if self.feedback is not None:
            self.feedback.reset()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors that a resumed run needs, by name: fp32, by name and length of one of three regions.

        The whole shard [numel], its compressed region [sparse_numel] or, by the prefix `dense_`, its excluded region
        [dense_numel]. What counts of them is their mean over nodes: a run on other nodes starts from that.
        """
        return {} if self.feedback is None else self.feedback.state_dict()

    def counters(self) -> dict[str, float]:
        """The numbers that a resumed run needs, by name."""
        return {"exchanged": self.exchanged} | ({} if self.fallback is None else self.fallback.counters())

    def restart(self, counters: dict[str, float]) -> None:
        """Starts anew with these counters: `state_dict` is zeros, for a resumed run to fill."""
        self.exchanged = int(counters.get("exchanged", 0))
        self.reset()
        if self.feedback is not None:
            self.feedback.loaded()
        if self.fallback is not None:
            self.fallback.load_counters(counters)
