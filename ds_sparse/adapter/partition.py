"""This rank's partition inside ZeRO's optimizers: where its masters stand, and its gradient when the step begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..optim.two_phase_adam import Place
from . import versions


class Owned(NamedTuple):
    """A parameter, or the part of one, that this rank owns: which, from where on, and where its master stands."""

    param: torch.nn.Parameter
    offset: int
    place: Place


class Partition(ABC):
    """What this rank owns, and its gradient, multiplied by the loss scale.

    Attributes:
        owned: in ZeRO's order. Gradients come and go one for each.
    """

    def __init__(self, zero: Any, owned: list[Owned]) -> None:
        self._zero, self.owned = zero, owned

    @abstractmethod
    def read(self) -> list[torch.Tensor]:
        """Without ZeRO's padding; of any shape, float dtype and device."""

    @abstractmethod
    def write(self, gradients: Iterator[torch.Tensor]) -> None:
        """Takes what the optimizer shall step along: fp32, 1-d, finite."""

    @abstractmethod
    def spoil(self) -> None:
        """Makes the norm of the gradient infinite, so that ZeRO skips the step."""


class Offloaded(Partition):
    """At any stage, with the optimizer on the CPU: in `.grad` of the masters.

    ZeRO notes the norm of each gradient that arrives, and forgets them after the step: one without is left over from
    an earlier step.
    """

    def read(self) -> list[torch.Tensor]:
        getattr(self._zero, "_wait_for_offload_copies", lambda: None)()  # stage 3 waits by itself
        arrived = self._zero.norm_for_param_grads
        return [grad if key in arrived else torch.zeros_like(grad) for key, grad in self._gradients()]

    def write(self, gradients: Iterator[torch.Tensor]) -> None:
        for (key, grad), new in zip(self._gradients(), gradients, strict=True):
            self._zero.norm_for_param_grads[key] = torch.linalg.vector_norm(new)
            grad.copy_(new)

    def spoil(self) -> None:
        for key, _ in self._gradients():
            self._zero.norm_for_param_grads[key] = torch.tensor(float("inf"))

    def _gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        for param, _, (master, start, numel) in self.owned:
            assert master.grad is not None  # ZeRO keeps it from the start where it offloads
            yield self._zero.get_param_id(param), master.grad.view(-1)[start : start + numel]


class Flat(Partition):
    """Stage 1 and 2: an equal part of each parameter group, in `averaged_gradients`."""

    def read(self) -> list[torch.Tensor]:
        gradients = []
        for group, params in enumerate(self._zero.params_in_partition):
            entries = [entry for entry in self._zero.averaged_gradients[group] if not _is_padding(entry)]
            gradients += entries[: len(params)]  # what follows the last parameter is padding, marked or not
        return gradients

    def write(self, gradients: Iterator[torch.Tensor]) -> None:
        for group, params in enumerate(self._zero.params_in_partition):
            written: list[torch.Tensor] = []
            left = len(params)
            for entry in self._zero.averaged_gradients[group]:
                if left and not _is_padding(entry):
                    written.append(next(gradients).view(entry.shape))
                    left -= 1
                else:
                    padding = torch.zeros_like(entry, dtype=torch.float32)
                    padding._zero_padding = True  # type: ignore[attr-defined]  # ZeRO's norm leaves marked entries out
                    written.append(padding)
            self._zero.averaged_gradients[group] = written

    def spoil(self) -> None:
        for entries in self._zero.averaged_gradients.values():
            entries[0].fill_(float("inf"))


class Split(Partition):
    """Stage 3: an equal part of each parameter, in `averaged_gradients`; the part may be padding, or end in it."""

    def read(self) -> list[torch.Tensor]:
        return [entry[:numel] for entry, numel in self._entries() if numel]

    def write(self, gradients: Iterator[torch.Tensor]) -> None:
        written = []
        for entry, numel in self._entries():
            written.append(torch.zeros(entry.numel(), device=entry.device))
            if numel:
                written[-1][:numel] = next(gradients)
        for group, params in enumerate(self._zero.fp16_groups):
            self._zero.averaged_gradients[group] = written[: len(params)]
            del written[: len(params)]

    def spoil(self) -> None:
        for entries in self._zero.averaged_gradients.values():  # not in place: what is padding there is never cleared
            entries[0] = torch.full_like(entries[0], float("inf"))

    def _entries(self) -> Iterator[tuple[torch.Tensor, int]]:
        for group, params in enumerate(self._zero.fp16_groups):
            for entry, param in zip(self._zero.averaged_gradients[group], params, strict=True):
                yield entry.view(-1), _numel_without_padding(param)


def partition_of(zero: Any, stage: int) -> Partition:
    """The partition of a ZeRO optimizer of stage 1, 2 or 3."""
    owned = list(_owned_at_stage_3(zero) if stage == 3 else _owned_at_stage_1_and_2(zero))
    if zero.offload_optimizer if stage == 3 else zero.cpu_offload:
        versions.require(zero, versions.OFFLOADED)
        return Offloaded(zero, owned)
    return Split(zero, owned) if stage == 3 else Flat(zero, owned)


def _owned_at_stage_1_and_2(zero: Any) -> Iterator[Owned]:
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
        for param in zero.params_in_partition[group]:
            key = zero.get_param_id(param)
            start = int(zero.grad_start_offset[group][rank][key])
            place = int(zero.grad_partition_insertion_offset[group][rank][key])
            numel = int(min(param.numel() - start, zero.partition_size[group] - place))
            yield Owned(param, start, Place(master, place, numel))


def _owned_at_stage_3(zero: Any) -> Iterator[Owned]:
    for master, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        place = 0
        for param in params:
            if numel := _numel_without_padding(param):
                yield Owned(param, _offset(param), Place(master, place, numel))
            place += param.partition_numel()


def _numel_without_padding(param: Any) -> int:
    return max(0, min(int(param.partition_numel()), int(param.ds_numel) - _offset(param)))


def _offset(param: Any) -> int:
    return int(param.partition_numel()) * torch.distributed.get_rank(param.ds_process_group)


def _is_padding(entry: torch.Tensor) -> bool:
    return getattr(entry, "_zero_padding", False)
