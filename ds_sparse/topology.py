"""NodeTopology: which data-parallel ranks share a node, and the two process groups that follow from it.

    node group    the ranks of this node, fast links: level 1, dense
    peer group    the ranks with the same index on every node, slow links: level 2, compressed
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .config import SECTION
from .errors import ConfigError

# What the launchers tell about the node a process runs on: `deepspeed` first, then torchrun.
_NODE_INDEX_VARIABLES = ("CROSS_RANK", "GROUP_RANK")


@dataclass(frozen=True)
class NodeTopology:
    """Nodes of one data-parallel group.

    Attributes:
        nodes: global ranks of each node, all of equal length, in the order of the data-parallel group.
        rank: this process's global rank.
        node_group, peer_group: process groups; a group may hold this rank alone.
        keys: `node_key` of every rank.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    node_group: Any
    peer_group: Any
    keys: Mapping[int, str] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> dict[int, str]:
        """Rank -> the words for it in messages, such as "rank 2 on node 1 (host-b)"."""
        hosts = {rank: key.partition("#")[0] for rank, key in self.keys.items()}
        return {
            rank: f"rank {rank} on node {node} ({hosts[rank]})"
            for node, ranks in enumerate(self.nodes)
            for rank in ranks
        }

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int:
        return len(self.nodes[0])


def node_key(environ: Mapping[str, str] = os.environ, hostname: str | None = None) -> str:
    """Names the node of this process: its host name, and the launcher's node index where there is one.

    The index tells apart containers that all call themselves `localhost`.
    """
    host = hostname or socket.gethostname()
    index = next((environ[name] for name in _NODE_INDEX_VARIABLES if name in environ), None)
    return host if index is None else f"{host}#{index}"


def split_into_nodes(
    ranks: Sequence[int], keys: Mapping[int, str], ranks_per_node: int | None
) -> tuple[tuple[int, ...], ...]:
    """Partitions the ranks of one data-parallel group into nodes.

    Args:
        ranks: global ranks in the order of the group.
        keys: `node_key` of every rank.
        ranks_per_node: overrides the keys: consecutive ranks form a node.

    Raises:
        ConfigError: the nodes would hold different numbers of ranks; lists them.
    """
    if ranks_per_node is not None:
        if len(ranks) % ranks_per_node:
            raise ConfigError(
                f"'{SECTION}.topology.ranks_per_node' is {ranks_per_node}; allowed is a divisor of the "
                f"{len(ranks)} data-parallel ranks. What to do: change it, or leave it out to have nodes detected."
            )
        return tuple(tuple(ranks[i : i + ranks_per_node]) for i in range(0, len(ranks), ranks_per_node))
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(keys[rank], []).append(rank)
    if len({len(members) for members in nodes.values()}) > 1:
        listing = "; ".join(f"{key}: ranks {members}" for key, members in nodes.items())
        raise ConfigError(
            f"'{SECTION}' needs the same number of data-parallel ranks on every node, but found {listing}. What to "
            f"do: start equally many on each, or set '{SECTION}.topology.ranks_per_node'."
        )
    return tuple(map(tuple, nodes.values()))


def build_topology(
    data_parallel_ranks: Sequence[int], ranks_per_node: int | None = None, timeout_seconds: float | None = None
) -> NodeTopology:
    """Finds the nodes and creates the process groups. A collective over the whole world.

    Args:
        data_parallel_ranks: global ranks of this process's data-parallel group. With tensor or pipeline parallelism
            each group has nodes of its own, cut from it in the same way.
        timeout_seconds: after which a collective of the groups fails; None for that of the default process group.
    """
    # 1. Everybody learns everybody's node and data-parallel group.
    mine = (node_key(), tuple(data_parallel_ranks))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    keys = {rank: key for rank, (key, _) in enumerate(everyone)}
    # 2. All ranks create all groups in one order, as new_group demands.
    rank, timeout = dist.get_rank(), group_timeout(timeout_seconds)
    topology = None
    for ranks in sorted({ranks for _, ranks in everyone}):
        nodes = split_into_nodes(ranks, keys, ranks_per_node)
        node_group = _new_groups(nodes, rank, timeout)
        peer_group = _new_groups(tuple(zip(*nodes, strict=True)), rank, timeout)
        if rank in ranks:
            topology = NodeTopology(nodes, rank, node_group, peer_group, keys)
    assert topology is not None  # `data_parallel_ranks` holds this rank
    return topology


def group_timeout(seconds: float | None) -> timedelta | None:
    """The timeout of a new group; None for torch's own, where the default process group does not tell its."""
    if seconds is not None:
        return timedelta(seconds=seconds)
    world: Any = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])  # `new_group` would take half an hour, not what the user chose
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _new_groups(members: Sequence[Sequence[int]], rank: int, timeout: timedelta | None) -> Any:
    """Creates one group for each of `members`; returns the one that holds `rank`."""
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            mine = group
    return mine
