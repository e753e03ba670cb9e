"""Launches the kernels with CuPy, on torch's stream; NVRTC compiles them at first use, CuPy caches that on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .launch import Argument, Module

FOLDER = Path(__file__).parent
MINIMUM_CAPABILITY = (7, 0)  # warp-level collectives with masks and forward progress of every thread


class CudaUnavailableError(RuntimeError):
    """CUDA tensors were given, but the kernels cannot run here; says why and what to install."""


class CupyLauncher:
    """Launcher of :mod:`ops.cuda.launch`. Pointers are torch's own; nothing is copied."""

    def __init__(self) -> None:
        self.cupy = _import_cupy()

    def processors(self, device: torch.device) -> int:
        return _processors(device.index)

    def launch(
        self, module: Module, kernel: str, grid: int, block: int, arguments: Sequence[Argument], device: torch.device
    ) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        with self.cupy.cuda.Device(device.index), self.cupy.cuda.ExternalStream(stream):
            self._function(module, kernel, device.index)((grid,), (block,), tuple(arguments))

    @cache  # noqa: B019  (one launcher per process)
    def _function(self, module: Module, kernel: str, device_index: int) -> Any:
        return self._module(module, device_index).get_function(kernel)

    @cache  # noqa: B019
    def _module(self, module: Module, device_index: int) -> Any:
        code = "\n".join(f'#line 1 "ops/cuda/{name}"\n{(FOLDER / name).read_text()}' for name in module.sources)
        return self.cupy.RawModule(code=code, options=("-std=c++17", *module.defines))


@cache
def _processors(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def _import_cupy() -> ModuleType:
    """CuPy, on a GPU that can run the kernels.

    Raises:
        CudaUnavailableError: naming the extra that brings the right CuPy, or what is wrong with the GPU.
    """
    if not torch.cuda.is_available():
        raise CudaUnavailableError("no usable CUDA device: torch.cuda.is_available() is False")
    capability = torch.cuda.get_device_capability()
    if capability < MINIMUM_CAPABILITY:
        found = ".".join(map(str, capability))
        raise CudaUnavailableError(f"the GPU's compute capability must be at least 7.0, got {found}")
    try:
        return import_module("cupy")
    except Exception as error:  # a CuPy for another CUDA version fails in many ways while it is imported
        extra = "cuda13" if (torch.version.cuda or "").startswith("13") else "cuda12"
        raise CudaUnavailableError(
            f"CUDA tensors need CuPy, which cannot be imported ({error}): pip install ds_sparse[{extra}]"
        ) from error
