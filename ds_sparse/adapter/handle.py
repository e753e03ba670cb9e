"""The handle that users find at `engine.compressed_communication`."""

from __future__ import annotations

import torch

from ..accounting import CommStats
from ..config import CommunicationConfig
from ..level2 import Level2
from ..topology import NodeTopology


class CompressedCommunication:
    """What this rank's level 2 does and keeps.

    Attributes:
        config: the section in effect.
        topology: which ranks share a node.
        stats: `.last` is the latest accumulation boundary, `.total` all of them.
    """

    def __init__(self, config: CommunicationConfig, topology: NodeTopology, level2: Level2) -> None:
        self.config, self.topology = config, topology
        self._level2 = level2

    @property
    def stats(self) -> CommStats:
        return self._level2.stats

    def residual(self, name: str) -> torch.Tensor:
        """What was not sent yet of a parameter's gradient (or momentum), as far as this rank owns the parameter.

        Args:
            name: as in `module.named_parameters()`.

        Returns:
            fp32 [elements of the parameter on this rank's shard]: the live buffer where it is compressed, zeros where
            the parameter is excluded or the method keeps nothing.

        Raises:
            KeyError: no part of such a parameter is on this rank.
        """
        layout, feedback = self._level2.layout, self._level2.method.feedback
        (segment,) = layout.find(name)
        if segment.dense or feedback is None:
            return torch.zeros(segment.numel, device=self._level2.device)
        return feedback.residual[segment.start : segment.start + segment.numel]

    def residual_norm(self) -> float:
        """L2 norm of all that this rank has not sent yet."""
        feedback = self._level2.method.feedback
        return 0.0 if feedback is None else feedback.norm()

    def grad_norm(self) -> float:
        """L2 norm of this rank's shard of the node's mean gradient, before clipping, at the last step not skipped."""
        return self._level2.grad_norm()

    def reset(self) -> None:
        """Forgets all that was not sent, and DGC's momentum, which is kept with it."""
        self._level2.method.reset()
