"""Shard: a flat fp32 vector and the named parameter segments inside it.

A shard is what one rank owns of the state of its node. Its entries stand in two regions:

    [0, sparse_numel)        entries that are compressed
    [sparse_numel, numel)    entries of excluded parameters, which are always sent dense

so that every method sees two contiguous views and never an index list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .config import ExcludeSettings
from .errors import did_you_mean


@dataclass(frozen=True)
class Segment:
    """A run of consecutive entries of one parameter inside a shard. All numbers are elements."""

    name: str
    numel: int
    dense: bool  # excluded from compression
    offset: int = 0  # of its first entry in the flattened parameter
    start: int = -1  # place in the shard; set by `ShardLayout`
    counted: bool = True  # in norms; false for a copy of what another rank of the same model holds and counts


class Exclusion:
    """Decides which parameters are sent dense: small ones and those whose name a pattern finds."""

    def __init__(self, settings: ExcludeSettings) -> None:
        self._min_numel = settings.min_numel
        self._patterns = [re.compile(pattern) for pattern in settings.patterns]

    def covers(self, name: str, numel: int) -> bool:
        """Whether the parameter `name` with `numel` elements in all (not only on this shard) is sent dense."""
        return numel < self._min_numel or any(pattern.search(name) for pattern in self._patterns)

    def unused(self, names: Iterable[str]) -> list[str]:
        """The patterns that find none of `names`."""
        names = list(names)
        return [pattern.pattern for pattern in self._patterns if not any(map(pattern.search, names))]


class ShardLayout:
    """Where each segment stands in a shard.

    Args:
        segments: in the order in which the owner (ZeRO, or a flat gradient) holds them; `start` is ignored.

    Attributes:
        segments: the same segments in the same order, with `start` set: compressed ones first, then excluded ones.
        numel, sparse_numel: elements in all, and in the compressed region.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        given = list(segments)
        starts: dict[int, int] = {}
        offset = 0
        for dense in (False, True):
            for position, segment in enumerate(given):
                if segment.dense is dense:
                    starts[position] = offset
                    offset += segment.numel
            if not dense:
                self.sparse_numel = offset
        self.numel = offset
        self.segments = [replace(segment, start=starts[i]) for i, segment in enumerate(given)]
        self._by_start = sorted(range(len(given)), key=starts.__getitem__)

    @property
    def dense_numel(self) -> int:
        """Elements of the excluded region."""
        return self.numel - self.sparse_numel

    def flatten_(self, out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies `tensors` into `out` fp32 [numel]: one a segment, in their order, of any float dtype and device."""
        if len(tensors) != len(self.segments):
            raise ValueError(f"got {len(tensors)} tensors for {len(self.segments)} segments")
        if tensors:
            torch.cat([tensors[i].detach().reshape(-1).to(out) for i in self._by_start], out=out)
        return out

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The 1-d view of each segment in `flat` [numel], in the order of `segments`."""
        return (flat[segment.start : segment.start + segment.numel] for segment in self.segments)

    def find(self, name: str) -> list[Segment]:
        """The segments of a parameter on this shard: empty when other ranks of the node own all of it.

        Raises:
            KeyError: no segment here has that name (with the nearest known one).
        """
        found = [segment for segment in self.segments if segment.name == name]
        if not found:
            known = {segment.name for segment in self.segments}
            raise KeyError(f"no part of a parameter '{name}' is on this rank's shard.{did_you_mean(name, known)}")
        return found
