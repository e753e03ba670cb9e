"""Where ZeRO stage 1 and 2 hold the gradient of this rank's partition, when its step begins.

Entries come and go one for each parameter, or part of one, in the order of `params_in_partition`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Gradients(Protocol):
    """The gradient of a partition, multiplied by the loss scale."""

    def read(self) -> list[torch.Tensor]:
        """One tensor an entry, without ZeRO's padding; of any shape, float dtype and device."""

    def write(self, entries: Iterator[torch.Tensor]) -> None:
        """Takes what the optimizer shall step along: fp32, 1-d, finite."""

    def spoil(self) -> None:
        """Makes ZeRO find an overflow."""


class Averaged:
    """In `averaged_gradients`, on the accelerator."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def read(self) -> list[torch.Tensor]:
        gradients = []
        for group, params in enumerate(self._zero.params_in_partition):
            entries = [entry for entry in self._zero.averaged_gradients[group] if not _is_padding(entry)]
            gradients += entries[: len(params)]  # what follows the last parameter is padding, marked or not
        return gradients

    def write(self, entries: Iterator[torch.Tensor]) -> None:
        for group, params in enumerate(self._zero.params_in_partition):
            written: list[torch.Tensor] = []
            left = len(params)
            for entry in self._zero.averaged_gradients[group]:
                if left and not _is_padding(entry):
                    written.append(next(entries).view(entry.shape))
                    left -= 1
                else:
                    padding = torch.zeros_like(entry, dtype=torch.float32)
                    padding._zero_padding = True  # type: ignore[attr-defined]  # ZeRO's norm leaves marked entries out
                    written.append(padding)
            self._zero.averaged_gradients[group] = written

    def spoil(self) -> None:
        for entries in self._zero.averaged_gradients.values():
            entries[0].fill_(float("inf"))


class Offloaded:
    """In `.grad` of the fp32 masters, on the CPU (ZeRO-Offload).

    ZeRO notes the norm of each entry that arrives, and forgets them after the step: an entry without one is left over
    from an earlier step.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def read(self) -> list[torch.Tensor]:
        self._zero._wait_for_offload_copies()
        arrived = self._zero.norm_for_param_grads
        return [entry if key in arrived else torch.zeros_like(entry) for key, entry in self._entries()]

    def write(self, entries: Iterator[torch.Tensor]) -> None:
        for (key, entry), new in zip(self._entries(), entries, strict=True):
            self._zero.norm_for_param_grads[key] = torch.linalg.vector_norm(new)
            entry.copy_(new)

    def spoil(self) -> None:
        self._zero.local_overflow = True

    def _entries(self) -> Iterator[tuple[int, torch.Tensor]]:
        for master, params in zip(
            self._zero.single_partition_of_fp32_groups, self._zero.params_in_partition, strict=True
        ):
            for param in params:
                key = self._zero.get_param_id(param)
                _, _, start, numel = self._zero.grad_position[key]
                yield key, master.grad.view(-1)[start : start + numel]


def _is_padding(entry: torch.Tensor) -> bool:
    return getattr(entry, "_zero_padding", False)
