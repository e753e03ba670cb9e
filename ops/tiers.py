"""Which implementation serves a tensor, and why.

Environment: ``DS_SPARSE_CPU_TIER`` and ``DS_SPARSE_CUDA_TIER`` force a tier by name (tests, bug reports).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from . import reference
from .types import Tier

CPU_TIERS = ("native", "numpy", "reference")
CUDA_TIERS = ("cupy", "reference")


@dataclass(frozen=True)
class Choice:
    """A tier, or None where there is none for the device; its name and the reason."""

    tier: Tier | None
    name: str
    reason: str


def tier_of(tensor: Tensor) -> Tier:
    """The tier for the tensor's device.

    Raises:
        RuntimeError: CUDA tensors without a usable CuPy; the message names the extra to install.
        ValueError: a device that has no kernels.
    """
    device = tensor.device.type
    if device not in ("cpu", "cuda"):
        raise ValueError(f"tensors must be on cpu or cuda, got {tensor.device}")
    choice = cpu_choice() if device == "cpu" else cuda_choice()
    if choice.tier is None:
        raise RuntimeError(choice.reason)
    return choice.tier


def backend_info() -> dict[str, dict[str, str]]:
    """For "cpu" and "cuda": the tier in use (or that would be; "none" when there is none) and the reason for it."""
    return {
        device: {"tier": choice.name, "reason": choice.reason}
        for device, choice in (("cpu", cpu_choice()), ("cuda", cuda_choice()))
    }


@cache
def cpu_choice() -> Choice:
    """Compiled kernels where they can be had, else NumPy; chosen once per process."""
    forced = _forced("DS_SPARSE_CPU_TIER", CPU_TIERS)
    if forced == "reference":
        return Choice(_as_tier(reference), "reference", "asked for by DS_SPARSE_CPU_TIER")
    reason = "asked for by DS_SPARSE_CPU_TIER"
    if forced != "numpy":
        from .cpu import build, native

        path, reason = build.library()
        if path is not None:
            try:
                tier = native.load(path)
                return Choice(tier, f"native ({tier.isa})", reason)
            except OSError as error:
                reason = f"the compiled kernels cannot be loaded: {error}"
        if forced == "native":
            return Choice(None, "none", f"DS_SPARSE_CPU_TIER=native, but {reason}")
    from .cpu import chunked_numpy

    return Choice(_as_tier(chunked_numpy), "numpy", reason)


@cache
def cuda_choice() -> Choice:
    """The CuPy kernels, or the reason why there are none."""
    if _forced("DS_SPARSE_CUDA_TIER", CUDA_TIERS) == "reference":
        return Choice(_as_tier(reference), "reference", "asked for by DS_SPARSE_CUDA_TIER")
    from .cuda.cupy_launcher import CudaUnavailableError, CupyLauncher
    from .cuda.pipeline import CudaTier

    try:
        launcher = CupyLauncher()
    except CudaUnavailableError as error:
        return Choice(None, "none", str(error))
    return Choice(CudaTier(launcher), "cupy", f"CuPy {launcher.cupy.__version__} on {torch.cuda.get_device_name()}")


def _forced(variable: str, names: tuple[str, ...]) -> str | None:
    value = os.environ.get(variable)
    if value and value not in names:
        raise ValueError(f"{variable} must be one of {', '.join(names)}, got {value!r}")
    return value or None


def _as_tier(module: object) -> Tier:
    """A module whose functions are a tier's methods."""
    return cast(Tier, module)
