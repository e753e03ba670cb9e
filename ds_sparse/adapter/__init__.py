"""The only package that knows DeepSpeed."""

from __future__ import annotations

from .hooks import initialize, install, uninstall

__all__ = ["initialize", "install", "uninstall"]
