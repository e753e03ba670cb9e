"""What the CUDA tier and its launchers agree on: which sources form a module, and how a kernel is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

THREADS = 256  # of every kernel but the sample's; as in the sources
Argument = np.generic  # numpy scalars, so that each has the size of the kernel's parameter


class Module(NamedTuple):
    """A set of kernels compiled together: sources in order, and what GRAD and VELOCITY stand for in them."""

    sources: tuple[str, ...]
    grad: int = 0
    velocity: int = 0

    @property
    def defines(self) -> tuple[str, ...]:
        return (f"-DGRAD={self.grad}", f"-DVELOCITY={self.velocity}")


class Launcher(Protocol):
    """Runs one kernel on the device of the tensors, ordered after what was launched before."""

    def processors(self, device: torch.device) -> int: ...

    def launch(
        self, module: Module, kernel: str, grid: int, block: int, arguments: Sequence[Argument], device: torch.device
    ) -> None: ...


def pointer(tensor: Tensor) -> np.uint64:
    return np.uint64(tensor.data_ptr())


def address(value: int) -> np.uint64:
    return np.uint64(value)


def u32(value: int) -> np.uint32:
    return np.uint32(value)
