"""CommStats: what was sent, counted on the line that sends it; and what took how long, timed where it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal

PARTS = ("select", "encode", "exchange", "decode", "rest")  # of the seconds of a boundary, in order
LATEST = ("density", "density_asked")  # shares: a total has the latest one, not their sum


@dataclass
class StepStats:
    """Counters of one exchange, or the sum over many. Bytes are those that this rank sent.

    `dense_bytes` is what a dense fp32 all-reduce of this rank's shard would have sent across nodes. `seconds` is the
    time spent in level 2. `density` is the share of compressed entries among those that may be compressed, and
    `density_asked` the share that the configuration asked for; in a total they are those of the last exchange.
    `fallback` counts exchanges made while dense was measured to be faster.

    Parts of `seconds`: `select_seconds` accumulates and selects; `encode_seconds` makes messages of it;
    `exchange_seconds` waits for the peers' data; `decode_seconds` reads their messages and sums them up;
    `rest_seconds` is what is left: waiting until all ranks agree that the gradient is finite, clipping, momentum.

    All are times of the host, and none of them waits for a GPU. There, what is selected, encoded and received is only
    queued; the host waits for it where it reads a result, when messages are checked, so that `decode_seconds` has most.
    """

    exchanges: int = 0
    inter_node_bytes: int = 0
    intra_node_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    select_seconds: float = 0.0
    encode_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0
    density: float = 1.0
    density_asked: float = 1.0
    skipped: int = 0
    fallback: int = 0

    @property
    def dense_over_wire(self) -> float:
        """dense_bytes / inter_node_bytes; 1.0 where nothing had to be sent."""
        return self.dense_bytes / self.inter_node_bytes if self.inter_node_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        """What dense would have sent more across nodes; negative where it would have sent less."""
        return self.dense_bytes - self.inter_node_bytes

    @property
    def rest_seconds(self) -> float:
        """What no part of `seconds` accounts for."""
        parts = self.select_seconds, self.encode_seconds, self.exchange_seconds, self.decode_seconds
        return self.seconds - sum(parts)


@dataclass
class CommStats:
    """`last` is the latest accumulation boundary, `total` all of them."""

    last: StepStats = field(default_factory=StepStats)
    total: StepStats = field(default_factory=StepStats)
    _open: StepStats = field(default_factory=StepStats)

    def count_bytes(self, link: str, sent: int) -> None:
        """Adds `sent` bytes to the boundary under way; `link` is "inter" or "intra"."""
        name = f"{link}_node_bytes"
        setattr(self._open, name, getattr(self._open, name) + sent)

    @contextmanager
    def time(self, part: Literal["select", "encode", "exchange", "decode"]) -> Iterator[None]:
        """Adds the time of the block to a part of the boundary under way. Blocks do not stand in each other."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            name = f"{part}_seconds"
            setattr(self._open, name, getattr(self._open, name) + time.perf_counter() - begun)

    def ask(self, density: float) -> None:
        """Says which density the boundary under way is to have; 1.0 where nobody says."""
        self._open.density_asked = density

    def close(
        self, *, exchanged: bool, dense_bytes: int, seconds: float, density: float, fallback: bool = False
    ) -> None:
        """Ends a boundary: either an exchange, or a step skipped for a non-finite gradient."""
        self.last = self._open
        self._open = StepStats()
        self.last.exchanges, self.last.skipped = int(exchanged), int(not exchanged)
        self.last.dense_bytes, self.last.seconds, self.last.density = dense_bytes, seconds, density
        self.last.fallback = int(fallback)
        if not exchanged:
            self.last.density_asked = self.total.density_asked
        for item in fields(StepStats):
            latest = getattr(self.last, item.name)
            before = 0 if item.name in LATEST else getattr(self.total, item.name)
            setattr(self.total, item.name, before + latest)

    @property
    def boundaries(self) -> int:
        """Accumulation boundaries seen so far, exchanged or skipped."""
        return self.total.exchanges + self.total.skipped
