"""ZeRO stage 3 over the ranks of one node: what the table of features does not show."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.engines import build_config, build_engine, build_model, flat_params, train
from tests.ranks import RankError, run_ranks

with contextlib.suppress(ImportError):  # versions before 0.18 have none; before the fork, as in tests/engines.py
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401

SECTION = {
    "topology": {"ranks_per_node": 2},
    "compressor": {"density": 0.05},
    "exclude": {"min_numel": 20},
    "sparse_momentum": {"freeze_step": 3},
}


def _engine(**zero: Any) -> Any:
    gc.freeze()
    zero = {"stage3_param_persistence_threshold": 0} | zero
    return build_engine(build_config(stage=3, section=SECTION, zero_optimization=zero))


def _params(engine: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return flat_params(engine)


def _split() -> Any:
    engine = _engine()
    train(engine, 2)
    node = set(engine.compressed_communication.topology.nodes[dist.get_rank() // 2])
    gathers_from = {
        rank for p in engine.module.parameters() for rank in dist.get_process_group_ranks(p.ds_process_group)
    }
    return gathers_from == node, [(p.ds_numel, p.ds_tensor.numel()) for p in engine.module.parameters()]


def test_parameters_are_split_over_the_ranks_of_one_node_and_gathered_from_them_alone():
    for from_the_node_alone, sizes in run_ranks(4, _split):
        assert from_the_node_alone
        assert all(part == -(-numel // 2) for numel, part in sizes)


def _uninterrupted(folder: str) -> Any:
    engine = _engine()
    train(engine, 5)
    engine.save_checkpoint(folder)
    train(engine, 3, start=5)
    return _params(engine), engine.compressed_communication.residual_norm()


def _resumed(folder: str) -> Any:
    engine = _engine()
    engine.load_checkpoint(folder)
    train(engine, 3, start=5)
    return _params(engine), engine.compressed_communication.residual_norm()


def test_resume_is_bitwise_the_same_run(tmp_path: Path):
    expected = run_ranks(4, _uninterrupted, str(tmp_path))
    resumed = run_ranks(4, _resumed, str(tmp_path))
    for (params, residual), (again, residual_again) in zip(expected, resumed, strict=True):
        assert torch.equal(params, again)
        assert residual == residual_again > 0.0


def _under_zero_init() -> None:
    config = build_config(stage=3, section=SECTION)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build_model()
    build_engine(config, model=model)



def test_a_model_that_is_split_already_is_refused():
    with pytest.raises(RankError, match=r"built under deepspeed.zero.Init.*build it without zero.Init"):
        run_ranks(2, _under_zero_init)


def _with_nvme(folder: str) -> None:
    _engine(offload_optimizer={"device": "nvme", "nvme_path": folder})


def test_offload_to_nvme_is_refused(tmp_path: Path):
    with pytest.raises(RankError, match=r"offload_optimizer.device' is nvme.*cpu"):
        run_ranks(2, _with_nvme, str(tmp_path))


def _with_secondary_partitions() -> None:
    _engine(zero_hpz_partition_size=2)


def test_secondary_partitions_are_refused():
    with pytest.raises(RankError, match=r"zero_hpz_partition_size' is 2.*parameters do not leave the node"):
        run_ranks(2, _with_secondary_partitions)
