"""What a method keeps, in files: one of each rank of each node, in safetensors, by parameter.

The metadata say which node and rank, of how many, which entries of each parameter, after which step. So a file is
never taken for another one, and any number of nodes and ranks can find in them what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..methods import Method
from ..shard import Segment, ShardLayout

FORMAT = 1
Counters = dict[str, float]


class UnusableError(Exception):
    """What the files hold cannot be used, and why: a clause that goes on from "the checkpoint ..."."""


@dataclass(frozen=True)
class Shape:
    """Nodes, and ranks of each."""

    nodes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.ranks} ranks"


@dataclass(frozen=True)
class Origin:
    """What all files of one checkpoint have in common.

    Attributes:
        method: as in the configuration.
        step: of the engine, so that files left over from an earlier checkpoint of the same name are told apart.
    """

    method: str
    shape: Shape
    step: int

    def header(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "method": self.method, "step": self.step,
            "nodes": self.shape.nodes, "ranks": self.shape.ranks,
        }  # fmt: skip


def file_name(node: int, rank: int, mp_rank: int) -> str:
    """Of the `rank`-th rank of a node, among those that hold the tensor-parallel part `mp_rank`."""
    return f"ds_sparse_node_{node:05d}_rank_{rank:05d}_mp_rank_{mp_rank:02d}.safetensors"


def write_state(path: Path, origin: Origin, method: Method, layout: ShardLayout) -> None:
    tensors = {
        _key(name, segment): view
        for name, tensor in method.state_dict().items()
        for segment, view in _pieces(layout, name, tensor)
    }
    pieces = {segment.name: [segment.offset, segment.numel] for segment in layout.segments}
    header = origin.header() | {"counters": method.counters(), "pieces": pieces}
    save_file(tensors, path, metadata={"ds_sparse": json.dumps(header)})


def _pieces(layout: ShardLayout, name: str, tensor: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
    """The segments that have a place in a tensor of a method's state, and their entries there.

    Such a tensor is of the whole shard, or of its compressed region, which is its first part; or, by the prefix
    `dense_`, of the excluded region behind it.
    """
    first = layout.sparse_numel if name.startswith("dense_") else 0
    for segment in layout.segments:
        start = segment.start - first
        if 0 <= start < tensor.numel():
            yield segment, tensor[start : start + segment.numel]


def _key(name: str, segment: Segment) -> str:
    """The same for both regions: a parameter that is excluded, or no longer, keeps its velocity."""
    return f"{name.removeprefix('dense_')}/{segment.name}"


class StateFile:
    """One file, opened. Tensors are read when asked for.

    Raises:
        UnusableError: it is missing, or damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise UnusableError(f"lacks the file {path.name}")
        try:
            self._file = safe_open(path, "pt")  # finds out a file that is too short, or too long
            self.header: dict[str, Any] = json.loads(self._file.metadata()["ds_sparse"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UnusableError(f"has a damaged file {path.name} ({error})") from error
        self.name = path.name
        self.keys = set(self._file.keys())

    def add_to_(self, out: torch.Tensor, key: str, segment: Segment) -> None:
        """Adds what the file has under `key` of the entries of `segment` to `out` [segment.numel]."""
        if key not in self.keys:
            return
        offset, numel = self.header["pieces"][segment.name]
        first = max(offset, segment.offset)
        last = min(offset + numel, segment.offset + segment.numel)
        if first < last:
            out[first - segment.offset : last - segment.offset] += self._file.get_slice(key)[
                first - offset : last - offset
            ]


class SavedState:
    """What the nodes of a checkpoint kept, and how one rank of other nodes takes it over.

    What counts is what is still to reach the parameters: the mean over the m nodes that wrote the checkpoint of
    residual + owned, as every exchange sums over nodes and divides by their number. On as many nodes, each takes over
    what its predecessor kept, however its ranks share it. On another number m' each takes over the mean over the m,
    whose mean over the m' is the same again: in sums over nodes, the one of m' is m'/m times the one of m. Velocities
    and momenta enter later steps by their mean in the same way.

    Args:
        folder: of the tag.
        node: index of this node.
        mp_rank: of this rank among the tensor-parallel ones.
        expected: method, shape and step of the run that goes on.

    Attributes:
        shape: of the nodes that wrote.

    Raises:
        UnusableError: there are no such files, or not all of them, or they are of another method or step.
    """

    def __init__(self, folder: Path, node: int, mp_rank: int, expected: Origin) -> None:
        first = _first_file(folder, node, mp_rank)
        if first.header["format"] != FORMAT:
            raise UnusableError(f"has files of format {first.header['format']}, this version reads {FORMAT}")
        if first.header["method"] != expected.method:
            raise UnusableError(f"was written by method '{first.header['method']}'")
        self.shape = Shape(first.header["nodes"], first.header["ranks"])
        self.counters: Counters = first.header["counters"]
        origin = Origin(expected.method, self.shape, expected.step)
        same = self.shape.nodes == expected.shape.nodes
        self._nodes = [
            [_open(folder / file_name(i, j, mp_rank), origin) for j in range(self.shape.ranks)]
            for i in ([node] if same else range(self.shape.nodes))
        ]

    def fill_(self, method: Method, layout: ShardLayout) -> list[str]:
        """Fills the state of `method`; returns what was kept of this rank's parameters but has no place there."""
        state, taken = method.state_dict(), set()
        for name, tensor in state.items():
            for segment, view in _pieces(layout, name, tensor):
                keys = [_key(name, segment)]
                if name == "residual" and "owned" not in state:
                    keys.append(_key("owned", segment))  # no exchange keeps it apart any more
                taken.update(keys)
                view.copy_(self._mean(keys, segment))
        mine = {segment.name for segment in layout.segments}
        kept = {key for node in self._nodes for file in node for key in file.keys}
        return sorted(key for key in kept - taken if key.partition("/")[2] in mine)

    def _mean(self, keys: Sequence[str], segment: Segment) -> torch.Tensor:
        """Over nodes, of the sum over `keys`, in one order on all ranks: fp32 [segment.numel]."""
        total = torch.full((segment.numel,), -0.0)  # to which any x adds up to x, bit for bit
        for node in self._nodes:
            for file in node:
                for key in keys:
                    file.add_to_(total, key, segment)
        return total.div_(len(self._nodes))


def _first_file(folder: Path, node: int, mp_rank: int) -> StateFile:
    """The file that says how many there are; of this node where the first node's disk is out of sight."""
    names = [file_name(i, 0, mp_rank) for i in (0, node)]
    for name in names:
        if (folder / name).exists():
            return StateFile(folder / name)
    if any(folder.glob("ds_sparse_node_*")):
        raise UnusableError(f"lacks the file {names[0]}")
    raise UnusableError("was written without compressed communication")


def _open(path: Path, origin: Origin) -> StateFile:
    file = StateFile(path)
    for key, value in origin.header().items():
        if file.header.get(key) != value:
            raise UnusableError(f"has a file {path.name} of {key} {file.header.get(key)} where {value} is due")
    return file
