"""Checkpoints of ZeRO stage 3 inside a node: saved once; resumed on other nodes, not on nodes of other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.engines import build_config, build_engine, flat_params, replicas_equal, train
from tests.ranks import run_ranks

SECTION = {"compressor": {"density": 0.05}, "exclude": {"min_numel": 20}, "sparse_momentum": {"freeze_step": 3}}


def _engine(ranks_per_node: int) -> Any:
    zero = {"stage3_param_persistence_threshold": 0}
    section = SECTION | {"topology": {"ranks_per_node": ranks_per_node}}
    return build_engine(build_config(stage=3, section=section, zero_optimization=zero))


def _params(engine: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return flat_params(engine)


def _unsent(engine: Any) -> dict[str, torch.Tensor]:
    handle = engine.compressed_communication
    return {segment.name: handle.residual(segment.name).clone() for segment in handle._level2.layout.segments}


def _save(folder: str) -> Any:
    engine = _engine(2)
    train(engine, 5)
    engine.save_checkpoint(folder)
    return _unsent(engine), _params(engine)


def _resume(folder: str, ranks_per_node: int) -> Any:
    engine = _engine(ranks_per_node)
    try:
        engine.load_checkpoint(folder)
    except Exception as error:
        return type(error).__name__, str(error)
    unsent, params = _unsent(engine), _params(engine)
    train(engine, 2, start=5)
    return unsent, params, _params(engine)


def test_stage_3_is_saved_by_one_node_and_resumed_on_another_number_of_them(tmp_path: Path):
    saved = run_ranks(4, _save, str(tmp_path))
    names = sorted(file.name for file in (tmp_path / "global_step5").glob("zero_*"))
    kinds = ("model_states", "optim_states")
    assert names == [f"zero_pp_rank_{rank}_mp_rank_00_{kind}.pt" for rank in range(2) for kind in kinds]
    resumed = run_ranks(6, _resume, str(tmp_path), 2)
    assert all(torch.equal(params, saved[0][1]) for _, params, _ in resumed)
    assert replicas_equal([[later] for *_, later in resumed]) and resumed[0][2].isfinite().all()
    for rank, (unsent, *_) in enumerate(resumed):
        for name, tensor in unsent.items():
            first, second = (saved[node * 2 + rank % 2][0][name] for node in range(2))
            assert torch.equal(tensor, (first + second) / 2) and (name != "2.weight" or tensor.any())


def test_stage_3_on_nodes_of_other_ranks_is_refused_on_all(tmp_path: Path):
    run_ranks(4, _save, str(tmp_path))
    for kind, message in run_ranks(2, _resume, str(tmp_path), 1):
        assert kind == "CheckpointError"
        assert "the checkpoint has 2 partitions of ZeRO stage 3; allowed is 1, as many as there are ranks" in message
        assert "What to do: start 2 ranks on each node" in message
