"""ErrorFeedback: the residual, the only state that compression of a shard needs."""

from __future__ import annotations

import torch

from .compressors.base import Accumulation, Compressor
from .config import ErrorFeedbackSettings
from .ops.reference import accumulate_
from .payload import Payload
from .shard import ShardLayout


class ErrorFeedback:
    """Keeps what was not sent and adds it to the next step (Seide et al. 2014; Stich et al. 2018, Algorithm 1).

    With `momentum`, DGC's momentum correction with factor masking (Lin et al. 2018, section 3.2 and 3.3): the
    momentum lives here, in `velocity`, and the optimizer must have none of its own.

    Args:
        layout: of the shard; its compressed region has a residual, its excluded region does not need one.

    Attributes:
        residual: fp32 [sparse_numel]; zeros where feedback is switched off.
        velocity: fp32 [sparse_numel], or None without momentum.
        dense_velocity: fp32 [dense_numel], or None: ordinary momentum of the excluded entries.
    """

    def __init__(self, layout: ShardLayout, device: torch.device, settings: ErrorFeedbackSettings) -> None:
        self._settings = settings
        self.residual = torch.zeros(layout.sparse_numel, device=device)
        self.velocity = self.dense_velocity = None
        if settings.momentum:
            self.velocity = torch.zeros_like(self.residual)
            self.dense_velocity = torch.zeros(layout.dense_numel, device=device)

    def take_(self, compressor: Compressor, grad: torch.Tensor, k: int, step: int) -> Payload:
        """Adds `grad` [sparse_numel] to what is kept and takes k entries out of it."""
        if k == self.residual.numel():
            return self._everything(grad, compressor.shared_indices)
        payload = compressor.take_(self.residual, self._accumulation(grad), k, step)
        if not self._settings.enabled:
            self.residual.zero_()
        return payload

    def take_all_(self, grad: torch.Tensor) -> torch.Tensor:
        """Adds `grad` [sparse_numel] to what is kept and takes everything out of it.

        The velocity goes on: nothing was held back, so there is nothing that it would count twice.
        """
        accumulate_(self.residual, self._accumulation(grad))
        taken = self.residual.clone()
        self.residual.zero_()
        return taken

    def _everything(self, grad: torch.Tensor, shared: bool) -> Payload:
        indices = torch.arange(grad.numel(), dtype=torch.int32, device=grad.device)
        return Payload(self.take_all_(grad), indices, grad.numel(), shared)

    def _accumulation(self, grad: torch.Tensor) -> Accumulation:
        momentum = self._settings.momentum if self.velocity is not None else None
        return Accumulation(grad, self._settings.decay, momentum, self.velocity)

    def take_dense_(self, grad: torch.Tensor) -> torch.Tensor:
        """What to send for the excluded entries `grad`: all of it, after the momentum."""
        if self.dense_velocity is None:
            return grad
        return self.dense_velocity.mul_(self._settings.momentum).add_(grad)

    def reset(self) -> None:
        """Forgets everything that was not sent."""
        for tensor in self.state_dict().values():
            tensor.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name."""
        state = {"residual": self.residual, "velocity": self.velocity, "dense_velocity": self.dense_velocity}
        return {name: tensor for name, tensor in state.items() if tensor is not None}
