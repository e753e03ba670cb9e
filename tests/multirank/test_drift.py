"""Nodes whose parameters part are found out; nodes whose parameters do not are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_sparse
from ds_sparse.drift import checksum
from tests.engines import build_config, build_engine, train
from tests.multirank.test_laws import METHODS
from tests.ranks import run_ranks

INTERVAL, CORRUPTED = 3, 4  # steps: the next comparison after the corruption is at step 6
COMMON = {"compressor": {"density": 0.05}, "exclude": {"min_numel": 20}, "watch": {"interval": INTERVAL}}


# ---- the checksum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_change_and_every_exchange_of_two_entries_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 65, dtype=torch.float64).to(dtype)
    sums = {int(checksum(tensor))}
    for i in range(64):
        bits = tensor.clone()
        bits[i] = -bits[i]  # one bit
        sums.add(int(checksum(bits)))
    for i in range(63):
        swapped = tensor.clone()
        swapped[[i, i + 1]] = tensor[[i + 1, i]]
        sums.add(int(checksum(swapped)))
    assert len(sums) == 1 + 64 + 63


def test_the_checksum_is_of_bits_whatever_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.full((5,), float("nan"))
    assert int(checksum(nan)) == int(checksum(nan.clone()))
    assert int(checksum(torch.zeros(5))) != int(checksum(-torch.zeros(5)))
    assert int(checksum(torch.zeros(0))) == 0
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = int(checksum(tensor))
    monkeypatch.setattr("ds_sparse.drift._CHUNK", 7)
    assert int(checksum(tensor)) == whole


# ---- corrupted ------------------------------------------------------------------------------------------------------


def _corrupted(stage: int, per_node: int, victim: int, interval: int) -> tuple[int, str]:
    section = COMMON | {
        "method": "sparse_gradient", "topology": {"ranks_per_node": per_node}, "watch": {"interval": interval}
    }  # fmt: skip
    engine = build_engine(build_config(stage=stage, optimizer="SGD", section=section))
    train(engine, CORRUPTED)
    if dist.get_rank() == victim:
        # At stage 0 the last parameter of the model, else this rank's shard.
        last = list(engine.optimizer.param_groups[-1]["params"])[-1]
        last.data.view(-1)[0] += 1e-3
    try:
        train(engine, 10, start=CORRUPTED)
    except ds_sparse.DriftError as error:
        return engine.global_steps, str(error)
    return engine.global_steps, ""


@pytest.mark.parametrize(
    ("stage", "per_node", "name", "nodes"),
    [
        (0, 2, "4.bias", "node 1 differs from node 0"),
        (1, 2, "2.weight", "node 1 differs from node 0"),  # where the second half of the parameters begins
        (2, 1, "0.weight", "node 3 differs from nodes 0, 1, 2"),
    ],
)
def test_one_changed_element_is_an_error_of_all_ranks_within_the_interval(
    stage: int, per_node: int, name: str, nodes: str
) -> None:
    for steps, said in run_ranks(4, _corrupted, stage, per_node, 3, INTERVAL):
        assert steps == 6
        assert said.startswith(f"after step 6 the parameter '{name}' is not the same on all nodes: {nodes}. What to do")


def test_without_the_watch_nobody_notices() -> None:
    """The control: nothing else would stop this run."""
    assert run_ranks(4, _corrupted, 0, 2, 3, 0) == [(CORRUPTED + 10, "")] * 4


# ---- not corrupted --------------------------------------------------------------------------------------------------


def _healthy(stage: int) -> list[int]:
    steps = []
    for section, optimizer in METHODS.values():
        section = COMMON | section | {"topology": {"ranks_per_node": 2}, "watch": {"interval": 1}}
        engine = build_engine(build_config(stage=stage, optimizer=optimizer, section=section))
        train(engine, 6)
        steps.append(engine.global_steps)
    return steps


@pytest.mark.parametrize("stage", [0, 1])
def test_no_method_gives_a_false_alarm(stage: int) -> None:
    assert run_ranks(4, _healthy, stage) == [[6] * len(METHODS)] * 4


def _tensors_compared(interval: int) -> int:
    engine: Any = build_engine(
        build_config(optimizer="SGD", section=COMMON | {
            "method": "dense", "topology": {"ranks_per_node": 1}, "watch": {"interval": interval}})
    )  # fmt: skip
    before = engine.compressed_communication.stats.total.inter_node_bytes
    train(engine, 7)
    stats = engine.compressed_communication.stats
    return stats.total.inter_node_bytes - before


def test_a_comparison_costs_a_few_bytes() -> None:
    # A checksum to the other node, and the flag's all-reduce over two: 8 bytes each; at steps 2, 4 and 6.
    assert run_ranks(2, _tensors_compared, 2)[0] - run_ranks(2, _tensors_compared, 0)[0] == 3 * (8 + 8)
