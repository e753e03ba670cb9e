"""Replacing the `step` of an optimizer object."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def replace_step(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `step` the optimizer's `step`; returns the one before.

    It is installed as a method of the optimizer itself: torch's lr schedulers take `optimizer.step.__func__` apart
    and bind it again, and look on it for the mark that an earlier scheduler left.
    """
    before: Callable[..., Any] = optimizer.step

    def installed(_: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    if hasattr(before, "_wrapped_by_lr_sched"):
        installed._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(installed, optimizer)
    return before
