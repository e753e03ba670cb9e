"""What an exchange costs: bytes, rounds and entries become seconds.

    seconds = rounds * latency + bytes / bandwidth + selected * SELECT + summed * SUM

The model decides between exchanges, so only what differs between them counts. It needs no measurement at start, and so
chooses the same in every run of one configuration; `exchange.link` says what the link is like.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import LinkSettings

# Seconds an element on one core of a server CPU (benchmarks/bench_select.py, benchmarks/bench_codec.py). A GPU is some
# thirty times faster, and there the link decides all the more.
SELECT_SECONDS = 1.5e-10  # selection beyond the accumulation that dense communication needs just as well
SUM_SECONDS = 6e-9  # decode an entry and add it


class Cost(NamedTuple):
    """Of one exchange on one rank.

    Attributes:
        sent: bytes across nodes.
        rounds: messages that wait for one another.
        selected: elements that a selection passes over.
        summed: entries that are decoded and added.
    """

    sent: int
    rounds: int
    selected: int = 0
    summed: int = 0

    def seconds(self, link: LinkSettings, ranks_per_node: int) -> float:
        """Predicted, when the ranks of a node share its link."""
        bytes_per_second = link.gbit_per_second * 1e9 / 8 / ranks_per_node
        on_the_way = self.rounds * link.latency_us * 1e-6 + self.sent / bytes_per_second
        return on_the_way + self.selected * SELECT_SECONDS + self.summed * SUM_SECONDS


def dense_bytes(numel: int, peers: int) -> int:
    """Bytes that a rank sends for a dense fp32 ring all-reduce of `numel` elements over `peers` ranks."""
    return 2 * (peers - 1) * 4 * numel // peers


def dense_cost(numel: int, peers: int) -> Cost:
    """Of that all-reduce."""
    return Cost(dense_bytes(numel, peers), 2 * (peers - 1))
