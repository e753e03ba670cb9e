"""Which ranks share a node, and the groups that follow from it."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse import ConfigError
from ds_sparse.topology import NodeTopology, build_topology, node_key, split_into_nodes
from tests.ranks import RankError, run_ranks

Groups = tuple[NodeTopology, list[int], list[int]]

# ---- the name of a node -----------------------------------------------------------------------------------------


def test_a_node_is_named_by_its_host_where_no_launcher_tells_more() -> None:
    assert node_key({}, "worker-3") == "worker-3"
    assert node_key({}) == socket.gethostname()


@pytest.mark.parametrize("variable", ["CROSS_RANK", "GROUP_RANK"])
def test_the_launchers_node_index_tells_containers_of_one_host_name_apart(variable: str) -> None:
    assert node_key({variable: "0"}, "localhost") != node_key({variable: "1"}, "localhost")


def test_one_index_on_two_hosts_makes_two_nodes() -> None:
    """Jobs started by hand may count every host as the first."""
    assert node_key({"GROUP_RANK": "0"}, "a") != node_key({"GROUP_RANK": "0"}, "b")


def test_deepspeeds_own_variable_counts_before_torchruns() -> None:
    assert node_key({"CROSS_RANK": "1", "GROUP_RANK": "0"}, "a") == node_key({"CROSS_RANK": "1"}, "a")


# ---- splitting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, hosts, nodes",
    [
        ([0, 1, 2, 3], "aabb", ((0, 1), (2, 3))),
        ([0, 1, 2, 3], "abab", ((0, 2), (1, 3))),  # ranks dealt out to the hosts in turn
        ([0, 1, 2, 3], "bbaa", ((0, 1), (2, 3))),  # in the order of the group, not of the names
        ([3, 2, 1, 0], "aabb", ((3, 2), (1, 0))),
        ([1, 3, 5, 7], "aaaabbbb", ((1, 3), (5, 7))),  # data-parallel ranks of a tensor-parallel job
        ([0, 1, 2], "abc", ((0,), (1,), (2,))),
        ([0, 1, 2], "aaa", ((0, 1, 2),)),
        ([0], "a", ((0,),)),
    ],
)
def test_ranks_of_one_host_form_a_node(ranks: list[int], hosts: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    assert split_into_nodes(ranks, dict(enumerate(hosts)), None) == nodes


@pytest.mark.parametrize(
    "ranks, ranks_per_node, nodes",
    [
        ([0, 1, 2, 3], 2, ((0, 1), (2, 3))),
        ([0, 1, 2, 3], 1, ((0,), (1,), (2,), (3,))),
        ([0, 1, 2, 3], 4, ((0, 1, 2, 3),)),
        ([0, 2, 4, 6], 2, ((0, 2), (4, 6))),
    ],
)
@pytest.mark.parametrize("hosts", ["aaaaaaa", "abababa"])
def test_a_given_number_overrides_the_hosts(
    ranks: list[int], ranks_per_node: int, nodes: tuple[tuple[int, ...], ...], hosts: str
) -> None:
    assert split_into_nodes(ranks, dict(enumerate(hosts)), ranks_per_node) == nodes


@pytest.mark.parametrize("ranks_per_node", [3, 5, 8])
def test_a_number_that_does_not_divide_is_refused(ranks_per_node: int) -> None:
    with pytest.raises(ConfigError) as error:
        split_into_nodes([0, 1, 2, 3], dict(enumerate("aaaa")), ranks_per_node)
    said = str(error.value)
    assert f"'compressed_communication.topology.ranks_per_node' is {ranks_per_node};" in said
    assert "a divisor of the 4 data-parallel ranks" in said and "What to do:" in said


def test_uneven_nodes_are_refused_with_the_list_of_them() -> None:
    with pytest.raises(ConfigError) as error:
        split_into_nodes([0, 1, 2], {0: "big", 1: "big", 2: "small"}, None)
    said = str(error.value)
    assert "big: ranks [0, 1]; small: ranks [2]" in said
    assert "'compressed_communication.topology.ranks_per_node'" in said and "What to do:" in said


# ---- groups, on forked ranks ------------------------------------------------------------------------------------


def _build(groups: list[list[int]], ranks_per_node: int | None, indices: list[str] | None) -> Groups:
    """The topology of this rank's group, with the global ranks of its node group and of its peer group."""
    rank = dist.get_rank()
    if indices is not None:
        os.environ["CROSS_RANK"] = indices[rank]
    built = build_topology(next(group for group in groups if rank in group), ranks_per_node)
    members = [dist.get_process_group_ranks(group) for group in (built.node_group, built.peer_group)]
    for group in (built.node_group, built.peer_group):
        dist.barrier(group)  # a group that is not the same everywhere hangs or fails here
    return NodeTopology(built.nodes, built.rank, None, None), *members


def build_on(world: int, *args: Any) -> list[Groups]:
    return run_ranks(world, _build, *args)


def test_peers_are_the_ranks_of_one_place_on_every_node() -> None:
    built = build_on(4, [[0, 1, 2, 3]], 2, None)
    assert [topology.rank for topology, _, _ in built] == [0, 1, 2, 3]
    assert {(topology.num_nodes, topology.ranks_per_node) for topology, _, _ in built} == {(2, 2)}
    assert [node for _, node, _ in built] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [peers for _, _, peers in built] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_nodes_are_found_by_what_the_launcher_tells_each_rank() -> None:
    built = build_on(4, [[0, 1, 2, 3]], None, ["0", "1", "0", "1"])
    assert [node for _, node, _ in built] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [peers for _, _, peers in built] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_ranks_of_one_machine_are_one_node_unless_told_otherwise() -> None:
    built = build_on(2, [[0, 1]], None, None)
    assert [(node, peers) for _, node, peers in built] == [([0, 1], [0]), ([0, 1], [1])]


def test_each_data_parallel_group_has_nodes_of_its_own() -> None:
    """Two-way tensor parallelism: ranks 0 and 2 hold one half of the model, 1 and 3 the other."""
    built = build_on(4, [[0, 2], [1, 3]], None, ["0", "0", "1", "1"])
    assert [topology.nodes for topology, _, _ in built] == [((0,), (2,)), ((1,), (3,))] * 2
    assert [peers for _, _, peers in built] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_all_ranks_refuse_uneven_nodes() -> None:
    with pytest.raises(RankError, match=r"#0: ranks \[0, 1\]; .*#1: ranks \[2\]") as error:
        build_on(3, [[0, 1, 2]], None, ["0", "0", "1"])
    assert error.value.types == {rank: "ConfigError" for rank in range(3)}


def _timeouts(seconds: float | None) -> list[float]:
    built = build_topology(range(dist.get_world_size()), 1, seconds)
    groups: list[Any] = [built.node_group, built.peer_group]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize(("seconds", "expected"), [(7.5, 7.5), (None, 11)])
def test_groups_wait_as_long_as_told_or_as_the_default_group_does(seconds: float | None, expected: float) -> None:
    assert run_ranks(2, _timeouts, seconds, group_timeout=11) == [[expected] * 2] * 2


def test_ranks_are_named_with_their_node_and_host() -> None:
    topology = NodeTopology(((0, 2), (1, 3)), 0, None, None, {0: "a#0", 1: "b#1", 2: "a#0", 3: "b"})
    assert topology.names == {
        0: "rank 0 on node 0 (a)", 2: "rank 2 on node 0 (a)", 1: "rank 1 on node 1 (b)", 3: "rank 3 on node 1 (b)",
    }  # fmt: skip
