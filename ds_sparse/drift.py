"""Whether parameters are still the same on all nodes: a checksum, compared now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .errors import DriftError
from .links import Link

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int32}  # element size -> words; odd weights need room above them
_FACTOR = 0x1E3779B97F4A7C15  # odd; of the golden ratio, as in Fibonacci hashing
_CHUNK = 1 << 22  # elements summed at once: 32 MiB for their weights


class ReplicaWatch:
    """Compares what this rank steps on with the ranks that step on the same on the other nodes.

    Synchronous methods keep it bitwise the same. What may still part it: faulty memory, a program that changes
    parameters on one rank, nodes whose processors round differently.

    Args:
        read: the tensors to compare, by name; the same names and sizes on all peers.
        order: of all names in the model.
        device: of the tensors.
        node, peers: links to the other ranks of this node, and to the same rank of the others.
        others: links to ranks that hold other parameters of the same model.
        interval: steps between two comparisons; 0 for none.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        order: Sequence[str],
        device: torch.device,
        node: Link,
        peers: Link,
        others: Sequence[Link],
        interval: int,
    ) -> None:
        self._read, self._order, self._device = read, {name: i for i, name in enumerate(order)}, device
        self._peers, self._links, self._interval = peers, (node, peers, *others), interval

    def after_step(self, step: int) -> None:
        """Compares when it is time to; a collective of all ranks then.

        Raises:
            DriftError: on all ranks, when any has found a difference.
        """
        if not self._interval or step % self._interval or self._peers.size == 1:
            return
        # 1. One number from each peer, and whether any rank has seen two that differ.
        parts = self._read()
        sums = torch.zeros(len(parts), dtype=torch.int64, device=self._device)
        for i, (_, tensor) in enumerate(parts):
            sums[i] = checksum(tensor)
        totals = self._peers.gather(sums.sum().reshape(1)).flatten()
        differ = (totals != totals[0]).any().to(torch.int64).reshape(1)
        for link in self._links:
            link.sum_(differ)
        if not differ:
            return
        # 2. Only then: which parameter, on which nodes.
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._find([name for name, _ in parts], sums))
        place, name, nodes = min(found for found in everyone if found is not None)
        raise DriftError(
            f"after step {step} the parameter '{name}' is not the same on all nodes: {nodes}. What to do: go on from a "
            f"checkpoint that was saved before, look for code that changes parameters on one rank only, and have the "
            f"memory of these nodes tested; see docs/faults.md."
        )

    def _find(self, names: Sequence[str], sums: torch.Tensor) -> tuple[int, str, str] | None:
        """The first parameter, in the order of the model, that differs among the peers; and the nodes."""
        table = self._peers.gather(sums)
        found = []
        for column in (table != table[0]).any(dim=0).nonzero().flatten().tolist():
            values = table[:, column].tolist()
            usual = max(values, key=values.count)  # of equally common ones that of the first node
            odd = [str(node) for node, value in enumerate(values) if value != usual]
            same = [str(node) for node, value in enumerate(values) if value == usual]
            found.append((self._order[names[column]], names[column], _differ(odd, same)))
        return min(found, default=None)


def _differ(odd: Sequence[str], same: Sequence[str]) -> str:
    return f"{_nodes(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_nodes(same)}"


def _nodes(numbers: Sequence[str]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(numbers)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: sum of the entries' bits, as words, each times an odd weight made of its place, modulo 2^64.

    A change of a single entry always changes the sum, for an odd number has an inverse; changes of several entries, or
    of their order, do so but for one case in about 2^64.

    Args:
        tensor: of any shape, with elements of 2, 4 or 8 bytes.
    """
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device).mul_(_FACTOR)
        weights.bitwise_xor_(weights >> 31).bitwise_or_(1)
        total += part.mul_(weights).sum()
    return total
