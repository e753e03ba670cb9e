"""Checkpoints of a pipeline: each stage has shards, files and residuals of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engines import build_config, build_engine, flat_params
from tests.multirank.feature_models import piped, pipeline
from tests.ranks import run_ranks

SECTION = {
    "topology": {"ranks_per_node": 1}, "compressor": {"density": 0.05}, "exclude": {"min_numel": 20},
    "sparse_momentum": {"freeze_step": 2},
}  # fmt: skip


def _engine(stage: int) -> Any:
    model = pipeline(False)
    return build_engine(build_config(stage=stage, accumulation=2, section=SECTION), model=model)


def _go_on(engine: Any) -> tuple[float, Any]:
    """From step 4: what was kept there, and the parameters three steps later."""
    norm = engine.compressed_communication.residual_norm()
    for step in range(4, 7):
        piped(engine, step)
    return norm, flat_params(engine)


def _run(folder: str) -> Any:
    results = []
    for stage in (0, 1):
        engine = _engine(stage)
        for step in range(4):
            piped(engine, step)
        engine.save_checkpoint(f"{folder}/{stage}")
        results.append(_go_on(engine))
    return results


def _resume(folder: str) -> Any:
    results = []
    for stage in (0, 1):
        engine = _engine(stage)
        engine.load_checkpoint(f"{folder}/{stage}")
        results.append(_go_on(engine))
    return results


def test_a_resumed_pipeline_is_bitwise_the_same_run(tmp_path: Path):
    expected, resumed = run_ranks(4, _run, str(tmp_path)), run_ranks(4, _resume, str(tmp_path))
    for rank, others in zip(expected, resumed, strict=True):
        for (norm, params), (again, later) in zip(rank, others, strict=True):
            assert norm == again > 0.0
            assert torch.equal(params, later)
    assert len({norm for ((norm, _), _) in expected}) == 4  # two stages of two nodes, none of which is another's
