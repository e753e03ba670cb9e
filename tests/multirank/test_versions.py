"""Versions of DeepSpeed: one outside of the tested range is said, and what one lacks is an error that names it."""

from __future__ import annotations

import ast
import configparser
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_sparse.adapter import versions
from ds_sparse.adapter.checks import check_settings
from ds_sparse.config import CommunicationConfig
from ds_sparse.errors import ConfigError
from tests.engines import build_config, build_engine, train
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.core

ADAPTER = Path(versions.__file__).parent
SECTION = {"topology": {"ranks_per_node": 1}, "exclude": {"min_numel": 20}, "sparse_momentum": {"freeze_step": 9}}
RANGE = f"{versions.OLDEST} to {versions.NEWEST}"


def _warnings(version: str, **config: Any) -> list[str]:
    deepspeed.__version__ = version
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    train(build_engine(build_config(section=SECTION, **config)), 2)
    return heard


@pytest.mark.parametrize("version", ["0.15.4", "0.19.99", "1.0.0+cu128"])
def test_a_version_outside_of_the_range_is_said_once(version):
    heard = run_ranks(2, _warnings, version)
    (warning,) = heard[0]
    assert version in warning and RANGE in warning
    assert heard[1] == []  # rank 0 speaks for all


@pytest.mark.parametrize("version", [versions.OLDEST, versions.NEWEST, f"{versions.NEWEST}+unknown"])
def test_a_version_inside_of_the_range_is_not(version):
    assert run_ranks(2, _warnings, version) == [[], []]


@pytest.mark.parametrize("version", ["0.17.6", "0.18.2"])
def test_a_version_that_loses_micro_batches_is_said(version):
    heard = run_ranks(2, _accumulating, 2, 2, version)
    (warning,) = heard[0]
    assert f"DeepSpeed {version} at ZeRO stage 2 steps on the last of 2 micro batches alone" in warning
    assert heard[1] == []


@pytest.mark.parametrize(
    ("stage", "accumulation", "version"), [(2, 2, "0.17.5"), (2, 2, "0.18.3"), (2, 1, "0.18.2"), (1, 2, "0.18.2")]
)
def test_and_only_such_a_version(stage, accumulation, version):
    assert run_ranks(2, _accumulating, stage, accumulation, version) == [[], []]


def _accumulating(stage: int, accumulation: int, version: str) -> list[str]:
    return _warnings(version, stage=stage, accumulation=accumulation)


def _bf16_at_stage_0(version: str) -> None:
    deepspeed.__version__ = version
    build_engine(build_config(stage=0, dtype="bf16", section=SECTION))


def test_bf16_at_stage_0_is_refused_where_deepspeed_scales_it():
    with pytest.raises(RankError, match=r"'bf16.enabled' is true at .* or use DeepSpeed 0.18.6 or later") as caught:
        run_ranks(2, _bf16_at_stage_0, "0.18.5")
    assert caught.value.types == {0: "ConfigError", 1: "ConfigError"}


NEW = {
    "'zero_optimization.stage' is 3": {"stage": 3},
    "'zero_optimization.offload_optimizer' is on": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "'torch_autocast.enabled' is true at ZeRO stage 0": {"stage": 0, "torch_autocast": {"enabled": True}},
    "'torch_autocast.dtype' is float16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "'data_types.grad_accum_dtype' is fp32": {"dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
}


@pytest.mark.parametrize("setting", NEW)
def test_what_was_tested_on_the_newest_version_alone_is_refused_on_older_ones(setting, monkeypatch):
    if "autocast" in setting and not hasattr(DeepSpeedEngine, "torch_autocast_enabled"):
        pytest.skip("this version of DeepSpeed does not know torch_autocast")
    monkeypatch.setattr(deepspeed, "__version__", "0.19.7")
    settings = DeepSpeedConfig(build_config(**NEW[setting]))
    (found,) = versions.untested_settings(settings)
    assert found.startswith(setting)
    with pytest.raises(ConfigError, match=r" on DeepSpeed 0.19.7; .* is that on .* What to do: use that version"):
        check_settings(settings, CommunicationConfig())
    monkeypatch.setattr(deepspeed, "__version__", versions.NEWEST)
    assert versions.untested_settings(settings) == []


def _without(name: str) -> None:
    delattr(DeepSpeedEngine, name)
    build_engine(build_config(section=SECTION))


@pytest.mark.parametrize("name", ["use_node_local_storage", "_configure_optimizer"])
def test_a_missing_name_is_an_error_that_names_it_and_the_version(name):
    with pytest.raises(RankError) as caught:
        run_ranks(2, _without, name)
    assert caught.value.types == {0: "RuntimeError", 1: "RuntimeError"}
    expected = f"DeepSpeed {deepspeed.__version__} has no {name} in DeepSpeedEngine"
    assert expected in str(caught.value)
    assert f"use a version from {RANGE}" in str(caught.value)


def test_all_missing_names_are_listed():
    with pytest.raises(RuntimeError, match="has no clip_grad, loss_scale in SimpleNamespace"):
        versions.require(SimpleNamespace(step=1), ["clip_grad", "step", "loss_scale"])


def _read_from(*owners: str) -> set[str]:
    """Attributes that the adapter reads from variables of these names, `self._engine` counting as `engine`."""
    found = set()
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "id", None) or getattr(node.value, "attr", "")
                found |= {node.attr} if owner.lstrip("_") in owners else set()
    return found


def test_every_name_that_the_adapter_reads_is_looked_for():
    ours = {"compressed_communication", "__dict__"}
    optional = {"checkpoint_mp_rank"}  # asked for in versions.py, with care
    replaced = {"_get_all_zero_checkpoint_state_dicts", "_reduce_non_expert_gradients"}
    assert (_read_from("engine") | replaced) - ours - optional == set(versions.ENGINE)
    assert _read_from("zero") <= {*versions.ZERO, *versions.ZERO_3, *versions.OFFLOADED}


def test_the_range_is_that_of_the_package():
    config = configparser.ConfigParser()
    config.read(ADAPTER.parents[1] / "setup.cfg")
    (needed,) = [line for line in config["options"]["install_requires"].split("\n") if line.startswith("deepspeed")]
    assert needed == f"deepspeed >= {versions.OLDEST}, < 0.20"
