"""The join to DeepSpeed: ways in, the handle, monitors, node detection."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_sparse
from ds_sparse.adapter import hooks, versions
from ds_sparse.ops import backend_info
from tests.engines import build_config, build_engine, build_model, flat_params, train
from tests.ranks import run_ranks

SECTION = {
    "method": "sparse_gradient",
    "topology": {"ranks_per_node": 2},
    "compressor": {"density": 0.05},
    "exclude": {"min_numel": 20, "patterns": [r"^4\."]},
}


def _params_after(section: dict[str, Any] | None, ours: bool, stage: int) -> torch.Tensor:
    with versions.no_graph():  # where the section is off, that is left as DeepSpeed has it
        engine = build_engine(build_config(stage=stage, section=section), ours=ours)
    assert not hasattr(engine, "compressed_communication")
    return train(engine, 5)[-1]


@pytest.mark.core
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("section", [None, {"enabled": False}], ids=["absent", "disabled"])
def test_without_the_section_nothing_changes_bitwise(section, stage):
    plain = run_ranks(2, _params_after, None, False, stage)[0]
    assert torch.equal(run_ranks(2, _params_after, section, True, stage)[0], plain)


early_bound_initialize = deepspeed.initialize  # as `from deepspeed import initialize` before `install()`


def _installed() -> tuple[bool, bool, bool]:
    config = build_config(optimizer="SGD", section=SECTION)

    def honoured() -> bool:
        engine = early_bound_initialize(model=build_model(), config=config)[0]
        return hasattr(engine, "compressed_communication")

    before = honoured()
    ds_sparse.install()
    ds_sparse.install()  # again is free
    during = honoured()
    hooks.uninstall()
    return before, during, honoured()


@pytest.mark.core
def test_install_reaches_names_that_were_imported_earlier():
    assert run_ranks(2, _installed) == [(False, True, False)] * 2


def _with_a_wrapper_of_another_library() -> bool:
    import functools

    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.__init__

    @functools.wraps(original)
    def wrapper(engine: Any, *args: Any, **kwargs: Any) -> None:
        original(engine, *args, **kwargs)

    DeepSpeedEngine.__init__ = wrapper
    engine = build_engine(build_config(optimizer="SGD", section=SECTION))
    return hasattr(engine, "compressed_communication") and DeepSpeedEngine.__init__ is wrapper


def test_wrappers_of_other_libraries_are_neither_taken_for_ours_nor_lost():
    assert run_ranks(2, _with_a_wrapper_of_another_library) == [True, True]


def _initialize_leaves_no_hooks() -> bool:
    build_engine(build_config(optimizer="SGD", section=SECTION))
    engine = deepspeed.initialize(model=build_model(), config=build_config(optimizer="SGD", section=SECTION))[0]
    return hasattr(engine, "compressed_communication")


def test_initialize_concerns_its_own_engine_only():
    assert run_ranks(2, _initialize_leaves_no_hooks) == [False, False]


def _handle(stage: int) -> dict[str, Any]:
    engine = build_engine(build_config(stage=stage, optimizer="SGD", section=SECTION))
    train(engine, 5)
    handle = engine.compressed_communication
    names = {segment.name for segment in handle._level2.layout.segments}
    residuals = {name: handle.residual(name).clone() for name in names}
    found = {"norm": handle.residual_norm(), "residuals": residuals, "stats": handle.stats}
    try:
        handle.residual("0.wieght")
    except KeyError as error:
        found["error"] = str(error)
    handle.reset()
    return found | {"norm_after_reset": handle.residual_norm(), "nodes": handle.topology.nodes}


@pytest.mark.core
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_handle_shows_what_is_kept(stage):
    results = run_ranks(4, _handle, stage)
    sizes = {name: param.numel() for name, param in build_model().named_parameters()}
    for node in (results[:2], results[2:]):
        for name, numel in sizes.items():  # the ranks of a node own each parameter exactly once
            assert sum(rank["residuals"].get(name, torch.empty(0)).numel() for rank in node) == numel
    for rank in results:
        squares = sum(float(r.square().sum()) for r in rank["residuals"].values())
        assert rank["norm"] == pytest.approx(squares**0.5, rel=1e-5)  # the same sum in another order
        assert rank["norm"] > 0.0
        assert rank["norm_after_reset"] == 0.0
        assert "no part of a parameter '0.wieght'" in rank["error"]
        assert rank["nodes"] == ((0, 1), (2, 3))
        for name, residual in rank["residuals"].items():
            excluded = sizes[name] < 20 or name.startswith("4.")
            assert bool(residual.any()) is not excluded
    stats = results[0]["stats"]
    assert stats.total.exchanges == 5
    assert stats.total.inter_node_bytes > stats.last.inter_node_bytes > 0
    assert stats.last.intra_node_bytes > 0
    assert stats.last.seconds > 0.0


def _detected() -> Any:
    os.environ["CROSS_RANK"] = str(dist.get_rank() // 2)  # what the launcher tells on two nodes of two
    section = {key: value for key, value in SECTION.items() if key != "topology"}
    engine = build_engine(build_config(optimizer="SGD", section=section))
    return engine.compressed_communication.topology.nodes


def test_nodes_are_detected_from_the_launchers_environment():
    assert run_ranks(4, _detected) == [((0, 1), (2, 3))] * 4


class _TensorParallel:
    """Megatron's interface for two tensor-parallel ranks next to each other; the model itself is whole on each."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        model_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self._model, self._data = model_groups[rank // 2], data_groups[rank % 2]

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_world_size(self) -> int:
        return 2


def _with_mpu(clipping: float) -> Any:
    section = SECTION | {"topology": {"ranks_per_node": 1}}
    config = build_config(optimizer="SGD", section=section, clipping=clipping)
    engine = build_engine(config, mpu=_TensorParallel())
    train(engine, 3)
    return engine.compressed_communication.topology.nodes, flat_params(engine)


def test_with_tensor_parallelism_nodes_are_taken_within_the_data_parallel_group():
    results = run_ranks(4, _with_mpu, 0.0)
    assert [nodes for nodes, _ in results] == [((0,), (2,)), ((1,), (3,))] * 2
    assert torch.equal(results[0][1], results[2][1])
    assert torch.equal(results[1][1], results[3][1])


def _monitored(folder: str, interval: int) -> None:
    section = SECTION | {"monitor": {"interval": interval}}
    monitors = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"},
    }
    engine = build_engine(build_config(optimizer="SGD", section=section, **monitors))
    train(engine, 4)


TAGS = [
    *("inter_node_bytes", "intra_node_bytes", "dense_bytes", "dense_over_wire", "gb_saved", "exchanges", "skipped"),
    "fallback",
    *("density", "density_asked", "residual_norm", "residual_over_gradient"),
    *("seconds", "select_seconds", "encode_seconds", "exchange_seconds", "decode_seconds", "rest_seconds"),
]


@pytest.mark.core
@pytest.mark.parametrize(("interval", "rows"), [(1, 4), (2, 2)])
def test_scalars_reach_the_monitors_of_deepspeed(tmp_path: Path, interval: int, rows: int):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(4, _monitored, str(tmp_path), interval)
    for tag in TAGS:
        with open(tmp_path / "csv" / f"Comm_{tag}.csv") as file:
            written = list(csv.reader(file))[1:]
        assert len(written) == rows
    accumulator = EventAccumulator(str(tmp_path / "board"))
    accumulator.Reload()
    scalars = set(accumulator.Tags()["scalars"])
    assert {f"Comm/{tag}" for tag in TAGS} <= scalars
    assert "Train/Samples/lr" in scalars  # DeepSpeed's own stand in the same run
    assert [event.value for event in accumulator.Scalars("Comm/exchanges")] == list(range(interval, 5, interval))


def _advice(optimizer: str) -> list[str]:
    import logging

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    engine = build_engine(build_config(optimizer=optimizer, section=SECTION))
    train(engine, 3)
    return heard


def test_sparse_gradient_with_adam_says_once_what_to_use_instead():
    heard = run_ranks(4, _advice, "AdamW")
    assert sum("Use method 'sparse_momentum'" in line for line in heard[0]) == 1
    assert heard[1] == []  # rank 0 speaks for all


def test_one_banner_line_says_what_is_on():
    (banner,) = [line for line in run_ranks(4, _advice, "SGD0")[0]]
    assert banner.startswith("compressed communication: 2 nodes x 2 ranks, sparse_gradient, mstopk at density 0.05;")
    assert "dense/wire" in banner
    assert banner.endswith(f"; kernels: {backend_info()['cpu']['tier']}")
