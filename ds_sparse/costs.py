"""What an exchange costs: bytes, rounds and entries become seconds.

    seconds = rounds * latency + bytes / bandwidth + selected * select + encoded * encode + summed * sum

The model decides between exchanges, so only what differs between them counts. It needs no measurement at start, and so
chooses the same in every run of one configuration; `exchange.link` says what the link is like. The planner puts
in constants that `ds_sparse probe` has measured.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import LinkSettings


class Constants(NamedTuple):
    """What the model takes as given: seconds that a rank works, and how well a collective uses the link.

    The defaults are those of one core of a server CPU (benchmarks/bench_select.py, benchmarks/bench_codec.py). A GPU is
    some thirty times faster, and there the link decides all the more.

    Attributes:
        select: an element, beyond the accumulation that dense communication needs just as well.
        encode: an entry; few beside those that are summed, so that a guess does without.
        sum: to decode an entry and add it.
        gather, deal: how much longer a byte takes in an all-gather and in an all-to-all than in an all-reduce.
    """

    select: float = 1.5e-10
    encode: float = 0.0
    sum: float = 6e-9
    gather: float = 1.0
    deal: float = 1.0


GUESS = Constants()


class Cost(NamedTuple):
    """Of one exchange on one rank.

    Attributes:
        sent: bytes across nodes.
        rounds: messages that wait for one another.
        selected: elements that a selection passes over.
        summed: entries that are decoded and added.
        encoded: entries that are encoded.
        gathered, dealt: of the bytes, those that travel in all-gathers and in all-to-alls; the rest is all-reduced.
    """

    sent: int
    rounds: int
    selected: int = 0
    summed: int = 0
    encoded: int = 0
    gathered: int = 0
    dealt: int = 0

    def seconds(self, link: LinkSettings, ranks_per_node: int, given: Constants = GUESS) -> float:
        """Predicted, when the ranks of a node share its link."""
        bytes_per_second = link.gbit_per_second * 1e9 / 8 / ranks_per_node
        weighed = self.sent + self.gathered * (given.gather - 1.0) + self.dealt * (given.deal - 1.0)
        on_the_way = self.rounds * link.latency_us * 1e-6 + weighed / bytes_per_second
        return on_the_way + self.selected * given.select + self.encoded * given.encode + self.summed * given.sum


def dense_bytes(numel: int, peers: int) -> int:
    """Bytes that a rank sends for a dense fp32 ring all-reduce of `numel` elements over `peers` ranks."""
    return 2 * (peers - 1) * 4 * numel // peers


def dense_cost(numel: int, peers: int) -> Cost:
    """Of that all-reduce."""
    return Cost(dense_bytes(numel, peers), 2 * (peers - 1))
