"""Exchanges: payload in, mean out, identical on every peer."""

from __future__ import annotations

from collections.abc import Callable

from ..compressors import Quota
from ..config import SECTION, CommunicationConfig, ExchangeSettings
from ..costs import dense_cost
from ..errors import ConfigError
from ..links import Link
from ..wire import Wire
from .all_gather import AllGatherExchange
from .base import Exchange
from .dense import DenseExchange
from .reduce_scatter import ReduceScatterExchange

__all__ = ["EXCHANGES", "AllGatherExchange", "DenseExchange", "Exchange", "ReduceScatterExchange", "choose_exchange"]

EXCHANGES: dict[str, Callable[[Link, ExchangeSettings], Exchange]] = {
    "all_gather": lambda peers, settings: AllGatherExchange(peers, _wire(settings), settings.chunks),
    "reduce_scatter": lambda peers, settings: ReduceScatterExchange(peers, _wire(settings)),
    "dense": lambda peers, settings: DenseExchange(peers),
}


def _wire(settings: ExchangeSettings) -> Wire:
    return Wire(settings.value_dtype, settings.index_encoding)


def choose_exchange(
    config: CommunicationConfig, peers: Link, ranks_per_node: int, quota: Quota, excluded: int
) -> tuple[Exchange | None, str]:
    """The exchange for what `quota` allows; None and the reason where the cost model says that dense is faster.

    Raises:
        ConfigError: that is so, and `fallback` is "error".
    """
    settings = config.exchange
    names = ("all_gather", "reduce_scatter") if settings.type == "cheapest" else (settings.type,)
    costs = {}
    for name in names:
        exchange = EXCHANGES[name](peers, settings)
        costs[exchange] = exchange.cost(quota, excluded)
    best = min(costs, key=lambda exchange: costs[exchange].seconds(settings.link, ranks_per_node))
    dense = dense_cost(quota.numel + excluded, peers.size)
    seconds = [cost.seconds(settings.link, ranks_per_node) for cost in (costs[best], dense)]
    if seconds[0] <= seconds[1] or config.fallback == "off":
        return best, ""
    reason = (
        f"density {quota.whole.density:.3g} on {peers.size} nodes would send {costs[best].sent} bytes a step in about "
        f"{_milliseconds(seconds[0])}, dense {dense.sent} bytes in {_milliseconds(seconds[1])}, on a link of "
        f"{settings.link.gbit_per_second:g} Gbit/s and {settings.link.latency_us:g} us"
    )
    if config.fallback == "error":
        raise ConfigError(
            f"'{SECTION}.fallback' is 'error' and {reason}. What to do: lower compressor.density, say what the link "
            f"is like in exchange.link, or set fallback to 'dense' or 'off'."
        )
    return None, reason


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
