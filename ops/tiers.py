"""Which implementation serves a tensor, and why."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .types import Tier


def tier_of(tensor: Tensor) -> Tier:
    """The tier for the tensor's device."""
    return reference


def backend_info() -> dict[str, dict[str, str]]:
    """For "cpu" and "cuda": the tier in use (or that would be) and the reason for it."""
    return {
        "cpu": {"tier": "reference", "reason": "no faster tier in this version"},
        "cuda": {"tier": "reference", "reason": "no faster tier in this version"},
    }
