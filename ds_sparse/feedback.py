"""ErrorFeedback: what was not sent yet, the only state that compression of a shard needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import ops
from .compressors.base import Accumulation, Quota
from .config import ErrorFeedbackSettings
from .ops.reference import accumulate_
from .payload import Form, Payload
from .shard import ShardLayout


class Selection(NamedTuple):
    """Entries that were taken out of a region of the shard: int32 [k] counted from its start, and fp32 [k]."""

    region: slice
    indices: torch.Tensor
    magnitudes: torch.Tensor


class ErrorFeedback:
    """Keeps what was not sent and adds it to the next step (Seide et al. 2014; Stich et al. 2018, Algorithm 1).

    With `momentum`, DGC's momentum correction with factor masking (Lin et al. 2018, section 3.2 and 3.3): the
    momentum lives here, in `velocity`, and the optimizer must have none of its own.

    Args:
        layout: of the shard; its compressed region has a residual, its excluded region does not need one.
        owns: whether this rank also keeps what an exchange summed and did not pass on.

    Attributes:
        residual: fp32 [sparse_numel]; zeros where feedback is switched off.
        owned: fp32 [sparse_numel], or None: the second residual, of sums over nodes; zeros outside of the range that
            this rank owned last.
        velocity: fp32 [sparse_numel], or None without momentum.
        dense_velocity: fp32 [dense_numel], or None: ordinary momentum of the excluded entries.
        selections: a list to which everything that is offered from here on is added; None while nobody looks.
    """

    selections: list[Selection] | None = None

    def __init__(
        self, layout: ShardLayout, device: torch.device, settings: ErrorFeedbackSettings, *, owns: bool = False
    ) -> None:
        self._settings = settings
        self.residual = torch.zeros(layout.sparse_numel, device=device)
        self.owned = torch.zeros_like(self.residual) if owns else None
        self._owned_range = slice(0, layout.sparse_numel)  # a superset of where `owned` is not zero
        self.velocity = self.dense_velocity = None
        if settings.momentum:
            self.velocity = torch.zeros_like(self.residual)
            self.dense_velocity = torch.zeros(layout.dense_numel, device=device)

    def take_(self, quota: Quota, grad: torch.Tensor, step: int, region: slice) -> Payload:
        """Adds `grad`, the part `region` of the vector, to what is kept there and takes entries out of it."""
        residual, form = self.residual[region], quota.form(region)
        if form.k == form.numel:
            indices = torch.arange(form.k, dtype=torch.int32, device=grad.device)
            return Payload(self.take_all_(grad, region), indices, form)
        payload = quota.compressor.take_(residual, self._accumulation(grad, region), form, step)
        if not self._settings.enabled:
            residual.zero_()
        return payload

    def take_all_(self, grad: torch.Tensor, region: slice = slice(None)) -> torch.Tensor:
        """Adds `grad` to what is kept and takes everything out of it.

        The velocity goes on: nothing was held back, so there is nothing that it would count twice.
        """
        residual = self.residual[region]
        accumulate_(residual, self._accumulation(grad, region))
        self._disown(slice(0, 0), region)
        taken = residual.clone()
        residual.zero_()
        return taken

    def give_back_(self, indices: torch.Tensor, lost: torch.Tensor, region: slice) -> None:
        """Keeps what rounding on the wire lost: fp32 [k] at the ascending int32 `indices` [k] of `region`."""
        if self._settings.enabled:
            ops.scatter_add_(self.residual[region], indices, lost)

    def take_owned_(self, summed: torch.Tensor, k: int, region: slice) -> Payload:
        """Adds `summed`, the nodes' sum over the `region` that this rank owns now, and takes the k largest out of it.

        What was kept for places that others own now goes into `residual`, so that they get it from there.
        """
        assert self.owned is not None
        self._disown(region, slice(0, self.owned.numel()))
        self._owned_range = region
        kept = self.owned[region]
        chosen = ops.ef_topk_(kept, summed, k, decay=self._settings.decay)
        if not self._settings.enabled:
            kept.zero_()
        return Payload(chosen.values, chosen.indices, Form(k, kept.numel()))

    def give_back_owned_(self, indices: torch.Tensor, lost: torch.Tensor) -> None:
        """`give_back_` for what `take_owned_` took."""
        assert self.owned is not None
        if self._settings.enabled:
            ops.scatter_add_(self.owned[self._owned_range], indices, lost)

    def disown_(self) -> None:
        """Moves all that is owned into `residual`: an exchange that owns nothing sends it from there."""
        self._disown(slice(0, 0), slice(0, self.residual.numel()))
        self._owned_range = slice(0, 0)

    def _disown(self, keep: slice, region: slice) -> None:
        """Moves what is owned in `region`, but outside of `keep`, into the residual."""
        if self.owned is None:
            return
        start, stop, _ = region.indices(self.owned.numel())
        first, last = max(start, self._owned_range.start), min(stop, self._owned_range.stop)
        for part in (slice(first, min(last, keep.start)), slice(max(first, keep.stop), last)):
            if part.start < part.stop:
                self.residual[part] += self.owned[part]
                self.owned[part] = 0.0

    def _accumulation(self, grad: torch.Tensor, region: slice) -> Accumulation:
        if self.velocity is None:
            return Accumulation(grad, self._settings.decay)
        return Accumulation(grad, self._settings.decay, self._settings.momentum, self.velocity[region])

    def take_dense_(self, grad: torch.Tensor) -> torch.Tensor:
        """What to send for the excluded entries `grad`: all of it, after the momentum."""
        if self.dense_velocity is None:
            return grad
        return self.dense_velocity.mul_(self._settings.momentum).add_(grad)

    def norm(self) -> float:
        """L2 norm of what was not sent."""
        kept = [self.residual] if self.owned is None else [self.residual, self.owned]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in kept])))

    def reset(self) -> None:
        """Forgets everything that was not sent."""
        for tensor in self.state_dict().values():
            tensor.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name."""
        state = {
            "residual": self.residual,
            "owned": self.owned,
            "velocity": self.velocity,
            "dense_velocity": self.dense_velocity,
        }
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def loaded(self) -> None:
        """To be called when the live tensors were set from outside: they may be nonzero anywhere."""
        self._owned_range = slice(0, self.residual.numel())


@dataclass
class Offer:
    """What this node has to send at one step; an exchange takes it, all at once or region by region.

    Attributes:
        vector: fp32 [numel], this node's; a region of it may be overwritten once it was taken.
        step: the same number on all ranks.
        taken: entries so far. Regions round up, each for itself.
    """

    feedback: ErrorFeedback
    quota: Quota
    vector: torch.Tensor
    step: int
    taken: int = 0

    @property
    def whole(self) -> slice:
        return slice(0, self.quota.numel)

    def take_(self, region: slice) -> Payload:
        payload = self.feedback.take_(self.quota, self.vector[region], self.step, region)
        self.taken += payload.form.k
        if self.feedback.selections is not None:  # a copy: encoding overwrites the values
            self.feedback.selections.append(Selection(region, payload.indices, payload.values.abs()))
        return payload
