"""Exchanges: payload in, mean out, identical on every peer."""

from __future__ import annotations

from ..config import SECTION, ExchangeSettings
from ..errors import ConfigError
from ..links import Link
from ..wire import Wire
from .all_gather import AllGatherExchange
from .base import Exchange, dense_bytes
from .dense import DenseExchange

__all__ = ["AllGatherExchange", "DenseExchange", "Exchange", "choose_exchange", "dense_bytes"]


def choose_exchange(
    settings: ExchangeSettings, fallback: str, peers: Link, k: int, n: int, dense_numel: int, *, shared: bool
) -> tuple[Exchange | None, str]:
    """The exchange for k of n entries; None and the reason where sending everything costs fewer bytes.

    Raises:
        ConfigError: that is so, and `fallback` is "error".
    """
    if settings.type == "dense":
        return DenseExchange(peers), ""
    sparse = AllGatherExchange(peers, Wire(settings.index_encoding))
    sparse_cost = sparse.wire_bytes(k, n, dense_numel, shared=shared)
    dense_cost = dense_bytes(n + dense_numel, peers.size)
    if sparse_cost <= dense_cost or fallback == "off":
        return sparse, ""
    reason = f"density {k / n:.3g} on {peers.size} nodes would send {sparse_cost} bytes a step, dense {dense_cost}"
    if fallback == "error":
        raise ConfigError(
            f"'{SECTION}.fallback' is 'error' and {reason}. What to do: lower compressor.density, or set fallback "
            f"to 'dense' or 'off'."
        )
    return None, reason
