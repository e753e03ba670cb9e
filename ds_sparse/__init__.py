"""Compressed communication for DeepSpeed: dense inside a node, sparse across nodes.

    engine, optimizer, _, _ = ds_sparse.initialize(model=model, config="ds_config.json")

with a section `compressed_communication` in the JSON (docs/configuration.md). `ds_sparse.install()` makes every
DeepSpeed engine of the process honour it, whoever builds it.
"""

from __future__ import annotations

from typing import Any

from ._version import __version__
from .errors import (
    CheckpointError,
    ConfigError,
    DriftError,
    ExchangeError,
    InactiveError,
    SlowerThanDenseError,
    WireError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DriftError",
    "ExchangeError",
    "InactiveError",
    "SlowerThanDenseError",
    "WireError",
    "__version__",
    "initialize",
    "install",
]


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` for an engine that honours the section: same arguments, same return values.

    The handle is `engine.compressed_communication`.

    Raises:
        ConfigError: the section cannot be run as written.
    """
    from . import adapter  # DeepSpeed takes seconds to import: only when it is needed

    return adapter.initialize(*args, **kwargs)


def install() -> None:
    """From now on every DeepSpeed engine of this process honours the section, whoever builds it."""
    from . import adapter

    adapter.install()
