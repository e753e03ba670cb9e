"""CommStats: what was sent, counted on the line that sends it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass
class StepStats:
    """Counters of one exchange, or the sum over many. Bytes are those that this rank sent.

    `dense_bytes` is what a dense fp32 all-reduce of this rank's shard would have sent across nodes. `seconds` is the
    time spent in level 2. `density` is the share of compressed entries among those that may be compressed; in a
    total it is that of the last exchange. `fallback` counts exchanges made while dense was measured to be faster.
    """

    exchanges: int = 0
    inter_node_bytes: int = 0
    intra_node_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    density: float = 1.0
    skipped: int = 0
    fallback: int = 0

    @property
    def dense_over_wire(self) -> float:
        """dense_bytes / inter_node_bytes; 1.0 where nothing had to be sent."""
        return self.dense_bytes / self.inter_node_bytes if self.inter_node_bytes else 1.0


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

    def close(
        self, *, exchanged: bool, dense_bytes: int, seconds: float, density: float, fallback: bool = False
    ) -> None:
        """Ends a boundary: either an exchange, or a step skipped for a non-finite gradient."""
        self.last = self._open
        self._open = StepStats()
        self.last.exchanges, self.last.skipped = int(exchanged), int(not exchanged)
        self.last.dense_bytes, self.last.seconds, self.last.density = dense_bytes, seconds, density
        self.last.fallback = int(fallback)
        for item in fields(StepStats):
            if item.name != "density":
                setattr(self.total, item.name, getattr(self.total, item.name) + getattr(self.last, item.name))
        self.total.density = density

    @property
    def boundaries(self) -> int:
        """Accumulation boundaries seen so far, exchanged or skipped."""
        return self.total.exchanges + self.total.skipped
