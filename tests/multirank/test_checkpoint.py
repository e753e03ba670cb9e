"""Save, stop, resume: bitwise the same trajectory, without a call by the user."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import build_config, build_engine, train
from tests.ranks import run_ranks

COMMON = {"topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05}, "exclude": {"min_numel": 20}}
SECTIONS = {
    "gradient": (COMMON | {"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}}, "SGD0"),
    "momentum, before the freeze": (COMMON | {"sparse_momentum": {"freeze_step": 7}}, "AdamW"),
    "momentum, after the freeze": (COMMON | {"sparse_momentum": {"freeze_step": 3}}, "AdamW"),
    "momentum, freeze detected later": (COMMON | {"sparse_momentum": {"stability": 0.01}}, "AdamW"),
}
STOP, STEPS = 5, 30  # beyond the 20 steps after which the detection may fire at beta2 = 0.95


def _engine(name: str, stage: int, section: dict[str, Any] | None = None) -> Any:
    own, optimizer = SECTIONS[name]
    return build_engine(build_config(stage=stage, optimizer=optimizer, section=section or own))


def _uninterrupted(name: str, stage: int, folder: str) -> Any:
    engine = _engine(name, stage)
    train(engine, STOP)
    engine.save_checkpoint(folder)
    return train(engine, STEPS - STOP, start=STOP)


def _resumed(name: str, stage: int, folder: str, forget: bool = False) -> Any:
    engine = _engine(name, stage)
    engine.load_checkpoint(folder)
    if forget:
        engine.compressed_communication.reset()
    return train(engine, STEPS - STOP, start=STOP)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.core if "before" not in name else ()) for name in SECTIONS]
)
def test_resume_is_bitwise_the_same_run(tmp_path: Path, name: str, stage: int):
    expected = run_ranks(4, _uninterrupted, name, stage, str(tmp_path))
    resumed = run_ranks(4, _resumed, name, stage, str(tmp_path))
    for one, other in zip(expected, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.core
def test_it_is_the_residual_that_makes_the_difference(tmp_path: Path):
    """The control: a resumed run that forgets what was not sent goes another way."""
    expected = run_ranks(4, _uninterrupted, "gradient", 1, str(tmp_path))[0]
    resumed = run_ranks(4, _resumed, "gradient", 1, str(tmp_path), True)[0]
    assert not torch.equal(expected[-1], resumed[-1])


def _resume_elsewhere(folder: str, per_node: int) -> Any:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    name = "momentum, after the freeze"
    engine = _engine(name, 0, SECTIONS[name][0] | {"topology": {"ranks_per_node": per_node}})
    engine.load_checkpoint(folder)
    residual = engine.compressed_communication.residual_norm()
    history = train(engine, 3, start=STOP)
    return heard, residual, history


def test_another_layout_starts_with_empty_residuals_and_says_so(tmp_path: Path):
    run_ranks(4, _uninterrupted, "momentum, after the freeze", 0, str(tmp_path))
    results = run_ranks(4, _resume_elsewhere, str(tmp_path), 1)
    heard, residual, history = results[0]
    assert residual == 0.0
    assert sum("they start at zero: it was written by other nodes" in line for line in heard) == 1
    assert torch.isfinite(history[-1]).all()
    assert all(torch.equal(history[-1], other) for *_, (*_, other) in results)


def _plain(folder: str) -> Any:
    engine = build_engine(build_config(stage=0), ours=False)
    train(engine, STOP)
    engine.save_checkpoint(folder)


@pytest.mark.core
def test_a_checkpoint_made_without_us_loads(tmp_path: Path):
    run_ranks(4, _plain, str(tmp_path))
    heard, residual, _ = run_ranks(4, _resume_elsewhere, str(tmp_path), 2)[0]
    assert residual == 0.0
    assert any("it was written without compressed communication" in line for line in heard)


def _plain_resumes_ours(folder: str) -> Any:
    engine = build_engine(build_config(stage=0), ours=False)
    engine.load_checkpoint(folder)
    return train(engine, 3, start=STOP)


def test_our_checkpoint_loads_without_us(tmp_path: Path):
    run_ranks(4, _uninterrupted, "momentum, after the freeze", 0, str(tmp_path))
    history = run_ranks(4, _plain_resumes_ours, str(tmp_path))[0]
    assert torch.isfinite(history[-1]).all()


def _resume_positionally(folder: str) -> tuple[float, int]:
    engine = _engine("gradient", 0)
    engine.load_checkpoint(folder, None, True, False)  # load_optimizer_states=False
    method = engine.compressed_communication._level2.method
    return engine.compressed_communication.residual_norm(), method.exchanged


def test_without_the_optimizers_state_ours_is_not_loaded_either(tmp_path: Path):
    run_ranks(4, _uninterrupted, "gradient", 0, str(tmp_path))
    assert run_ranks(4, _resume_positionally, str(tmp_path)) == [(0.0, 0)] * 4


def _resume_with_a_hole(folder: str) -> tuple[float, int]:
    engine = _engine("gradient", 0)
    engine.load_checkpoint(folder)
    method = engine.compressed_communication._level2.method
    return engine.compressed_communication.residual_norm(), method.exchanged


def test_when_one_rank_cannot_load_all_start_anew(tmp_path: Path):
    run_ranks(4, _uninterrupted, "gradient", 0, str(tmp_path))
    (tmp_path / f"global_step{STOP}" / "ds_sparse_rank_00003.safetensors").unlink()
    assert run_ranks(4, _resume_with_a_hole, str(tmp_path)) == [(0.0, STOP)] * 4
