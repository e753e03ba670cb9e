"""Save, stop, resume: bitwise the same trajectory, without a call by the user; and files that others can read."""

from __future__ import annotations

import logging
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.engines import build_config, build_engine, build_model, flat_params, train
from tests.ranks import run_ranks

COMMON = {"topology": {"ranks_per_node": 2}, "compressor": {"density": 0.05}, "exclude": {"min_numel": 20}}
OWNING = COMMON | {"exchange": {"type": "reduce_scatter", "value_dtype": "int8"}, "fallback": "off"}
SECTIONS = {
    "gradient": (COMMON | {"method": "sparse_gradient", "error_feedback": {"momentum": 0.9}}, "SGD0"),
    "gradient, summed by owners": (OWNING | {"method": "sparse_gradient"}, "SGD0"),
    "momentum, before the freeze": (COMMON | {"sparse_momentum": {"freeze_step": 7}}, "AdamW"),
    "momentum, after the freeze": (COMMON | {"sparse_momentum": {"freeze_step": 3}}, "AdamW"),
    "momentum, freeze detected later": (COMMON | {"sparse_momentum": {"stability": 0.01}}, "AdamW"),
    "dense": (COMMON | {"method": "dense"}, "AdamW"),
}
STOP = 5
STEPS = {"momentum, freeze detected later": 30}  # beyond the 20 after which it may fire at beta2 = 0.95; else 12
STAGES = (0, 1, 2)


def _engine(name: str, stage: int, **more: Any) -> Any:
    section, optimizer = SECTIONS[name]
    return build_engine(build_config(stage=stage, optimizer=optimizer, section=section | more))


def _listen() -> list[str]:
    """What is logged on this rank from here on."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ds_sparse").addHandler(handler)
    return heard


# ---- the same layout --------------------------------------------------------------------------------------------


def _go_on(engine: Any, name: str) -> list[torch.Tensor]:
    return train(engine, STEPS.get(name, 12) - STOP, start=STOP)


def _uninterrupted(name: str, folder: str, stages: Any = STAGES) -> Any:
    histories = []
    for stage in stages:
        engine = _engine(name, stage)
        train(engine, STOP)
        assert engine.save_checkpoint(f"{folder}/{stage}")
        histories.append(_go_on(engine, name))
    return histories


def _resumed(name: str, folder: str, stages: Any = STAGES, forget: str = "") -> Any:
    histories = []
    for stage in stages:
        engine = _engine(name, stage)
        engine.load_checkpoint(f"{folder}/{stage}")
        if forget:
            engine.compressed_communication._level2.method.state_dict()[forget].zero_()
        histories.append(_go_on(engine, name))
    return histories


@pytest.mark.core
@pytest.mark.parametrize("name", SECTIONS)
def test_resume_is_bitwise_the_same_run(tmp_path: Path, name: str):
    expected = run_ranks(4, _uninterrupted, name, str(tmp_path))
    resumed = run_ranks(4, _resumed, name, str(tmp_path))
    for rank, others in zip(expected, resumed, strict=True):
        for stage, one, other in zip(STAGES, rank, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"stage {stage}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, _uninterrupted, "gradient, summed by owners", str(folder))
    return folder


@pytest.mark.core
@pytest.mark.parametrize("forget", ["residual", "owned"])
def test_what_was_not_sent_makes_the_difference(saved: Path, forget: str):
    """The control: a resumed run that forgets it goes another way."""
    name = "gradient, summed by owners"
    (expected, *_), (resumed, *_) = (
        run_ranks(4, _resumed, name, str(saved), [1], forgotten)[0] for forgotten in ("", forget)
    )
    assert not torch.equal(expected[-1], resumed[-1])


def _own_disks(folder: str) -> list[Any]:
    """Run, save and resume, each node on a disk of its own."""
    local = dist.get_rank() % 2
    os.environ["LOCAL_RANK"] = str(local)
    disk = f"{folder}/{dist.get_rank() // 2}"
    section, optimizer = SECTIONS["gradient"]
    config = build_config(optimizer=optimizer, section=section, checkpoint={"use_node_local_storage": True})
    engine = build_engine(config)
    train(engine, STOP)
    engine.save_checkpoint(disk, "tag")
    resumed = build_engine(config)
    resumed.load_checkpoint(disk, "tag")
    return [train(engine, 4, start=STOP), train(resumed, 4, start=STOP)]


def test_every_node_saves_all_partitions_to_a_disk_of_its_own(tmp_path: Path):
    for expected, resumed in run_ranks(4, _own_disks, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
    assert all(len(list((tmp_path / node / "tag").glob("zero_pp_rank_*"))) == 2 for node in "01")
    assert not list((tmp_path / "0").rglob("ds_sparse_node_00001_*"))


# ---- files that cannot be used ----------------------------------------------------------------------------------


def _spoil(folder: Path, how: str) -> None:
    file = folder / "ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors"
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "first missing":
        (folder / "ds_sparse_node_00000_rank_00000_mp_rank_00.safetensors").unlink()
    elif how == "truncated":
        file.write_bytes(content[: len(content) - 1])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.write_bytes(content.replace(b'\\"step\\": 5', b'\\"step\\": 4'))


OBSTACLES = {
    "missing": "it lacks the file ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors",
    "first missing": "it lacks the file ds_sparse_node_00000_rank_00000_mp_rank_00.safetensors",
    "truncated": "it has a damaged file ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors (Error while",
    "empty": "it has a damaged file ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors (Error while",
    "stale": "it has a file ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors of step 4 where 5 is due",
}


def _load_spoiled(folder: str) -> list[tuple[float, int, list[str]]]:
    heard, results = _listen(), []
    for how in OBSTACLES:
        engine = _engine("gradient, summed by owners", 1)
        heard.clear()
        engine.load_checkpoint(f"{folder}/{how}")
        method = engine.compressed_communication._level2.method
        results.append((engine.compressed_communication.residual_norm(), method.exchanged, list(heard)))
    return results


def test_when_one_file_cannot_be_used_all_ranks_start_anew(saved: Path, tmp_path: Path):
    for how in OBSTACLES:
        shutil.copytree(saved / "1", tmp_path / how)
        _spoil(tmp_path / how / f"global_step{STOP}", how)
    for rank, results in enumerate(run_ranks(4, _load_spoiled, str(tmp_path))):
        for how, (norm, exchanged, heard) in zip(OBSTACLES, results, strict=True):
            assert (norm, exchanged) == (0.0, STOP), how
            if rank:
                assert not heard
            else:
                (line,) = heard
                assert f"no residuals for this run, they start at zero: {OBSTACLES[how]}" in line


def _other_settings(folder: str) -> Any:
    heard, kept = _listen(), []
    settings = ({}, {"exchange": {"type": "all_gather"}}, {"exclude": {"min_numel": 600}}, {"method": "dense"})
    for more in settings:
        engine = _engine("gradient, summed by owners", 1, **more)
        heard.clear()
        engine.load_checkpoint(f"{folder}/1")
        if more == {"method": "dense"}:
            kept.append((torch.empty(0), list(heard)))
            continue
        feedback = engine.compressed_communication._level2.method.feedback
        unsent = feedback.residual if feedback.owned is None else feedback.residual + feedback.owned
        kept.append((unsent.clone(), list(heard)))
    return kept


def test_other_settings_keep_what_they_can_and_say_what_they_drop(saved: Path):
    same, gathered, excluded, dense = run_ranks(4, _other_settings, str(saved))[0]
    assert same[0].any() and torch.equal(same[0], gathered[0])
    assert not same[1] and not gathered[1]
    assert excluded[0].numel() < same[0].numel()
    (line,) = excluded[1]
    assert line.startswith("the checkpoint holds what this configuration does not use, it is dropped: ")
    assert "residual/0.weight" in line and "owned/0.weight" in line and "2.weight" not in line
    assert "they start at zero: it was written by method 'sparse_gradient'" in dense[1][0]


def _resume_positionally(folder: str) -> tuple[float, int]:
    engine = _engine("gradient, summed by owners", 0)
    engine.load_checkpoint(f"{folder}/0", None, True, False)  # load_optimizer_states=False
    method = engine.compressed_communication._level2.method
    return engine.compressed_communication.residual_norm(), method.exchanged


def test_without_the_optimizers_state_ours_is_not_loaded_either(saved: Path):
    assert run_ranks(4, _resume_positionally, str(saved)) == [(0.0, 0)] * 4


# ---- with and without us ----------------------------------------------------------------------------------------


def _plain_run(folder: str) -> list[torch.Tensor]:
    after = []
    for stage in STAGES:
        engine = build_engine(build_config(stage=stage), ours=False)
        train(engine, STOP)
        engine.save_checkpoint(f"{folder}/{stage}")
        after.append(flat_params(engine))
    return after


def _ours_resumes_plain(folder: str) -> Any:
    results, heard = [], _listen()
    for stage in STAGES:
        engine = _engine("momentum, before the freeze", stage)
        heard.clear()
        engine.load_checkpoint(f"{folder}/{stage}")
        norm = engine.compressed_communication.residual_norm()
        results.append((norm, list(heard), flat_params(engine), train(engine, 4, start=STOP)[-1]))
    return results


@pytest.mark.core
def test_a_checkpoint_made_without_us_loads(tmp_path: Path):
    expected = run_ranks(4, _plain_run, str(tmp_path))[0]
    for stage, params, (norm, heard, loaded, later) in zip(
        STAGES, expected, run_ranks(4, _ours_resumes_plain, str(tmp_path))[0], strict=True
    ):
        assert norm == 0.0
        assert torch.equal(loaded, params), f"stage {stage}"  # at stage 1 and 2 from four partitions into two
        assert later.isfinite().all()
        assert [line for line in heard if "it was written without compressed communication" in line] == heard


def _masters(engine: Any) -> list[torch.Tensor]:
    """This rank's flat masters and moments, as one list."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    params = [param for group in inner.param_groups for param in group["params"]]
    return [t.detach().clone() for p in params for t in (p, *inner.state[p].values()) if torch.is_tensor(t)]


def _save_ours(folder: str, stage: int) -> list[torch.Tensor]:
    engine = _engine("momentum, after the freeze", stage)
    train(engine, STOP)
    engine.save_checkpoint(folder)
    return _masters(engine)


def _plain_resumes_ours(folder: str, stage: int, tag: str | None = None, universal: bool = False) -> Any:
    config = build_config(stage=stage, checkpoint={"load_universal": universal})
    engine = build_engine(config, ours=False)
    assert engine.load_checkpoint(folder, tag)[0] is not None
    return _masters(engine), flat_params(engine), train(engine, 3, start=STOP)[-1]


@pytest.mark.parametrize("stage", STAGES)
def test_our_checkpoint_loads_without_us(tmp_path: Path, stage: int):
    """On as many ranks as a node has, as the nodes hold the same; at stage 0 every rank holds everything."""
    expected = run_ranks(4, _save_ours, str(tmp_path), stage)
    resumed = run_ranks(2, _plain_resumes_ours, str(tmp_path), stage)
    for ours, (plain, _, later) in zip(expected[:2], resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        assert torch.equal(later, resumed[0][2]) and later.isfinite().all()
    names = sorted(file.name for file in (tmp_path / f"global_step{STOP}").iterdir())
    ours = [f"ds_sparse_node_0000{i}_rank_0000{j}_mp_rank_00.safetensors" for i in range(2) for j in range(2)]
    partitions = [f"zero_pp_rank_{j}_mp_rank_00_optim_states.pt" for j in range(2)] if stage else []
    assert names == [*ours, "mp_rank_00_model_states.pt", *partitions]
    if stage:
        merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        flat = torch.cat([merged[name].reshape(-1) for name, _ in build_model().named_parameters()])
        assert torch.equal(flat, resumed[0][1])


def _interleaved(folder: str) -> list[torch.Tensor]:
    os.environ["CROSS_RANK"] = str(dist.get_rank() % 2)  # ranks 0 and 2 on one node, 1 and 3 on the other
    section, _ = SECTIONS["momentum, after the freeze"]
    engine = build_engine(build_config(section=section | {"topology": {}}))
    assert engine.compressed_communication.topology.nodes == ((0, 2), (1, 3))
    train(engine, STOP)
    engine.save_checkpoint(folder)
    return _masters(engine)


def test_nodes_whose_ranks_are_not_consecutive_save_all_partitions(tmp_path: Path):
    expected = run_ranks(4, _interleaved, str(tmp_path))
    resumed = run_ranks(2, _plain_resumes_ours, str(tmp_path), 1)
    for ours, (plain, *_) in zip((expected[0], expected[2]), resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def _load_universal(folder: str, tag: str) -> Any:
    section, _ = SECTIONS["momentum, after the freeze"]
    engine = build_engine(build_config(section=section, checkpoint={"load_universal": True}))
    engine.load_checkpoint(folder, tag)
    return engine.compressed_communication.residual_norm(), flat_params(engine)


def test_universal_conversion_works_and_takes_our_files_when_they_are_copied(tmp_path: Path):
    folder, tag = tmp_path / f"global_step{STOP}", f"global_step{STOP}_universal"
    run_ranks(4, _save_ours, str(tmp_path), 1)
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder), output_folder=str(tmp_path / tag), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip
    _, params, later = run_ranks(4, _plain_resumes_ours, str(tmp_path), 1, tag, True)[0]
    assert later.isfinite().all()
    norm, loaded = run_ranks(4, _load_universal, str(tmp_path), tag)[0]
    assert norm == 0.0 and torch.equal(loaded, params)
    for file in folder.glob("ds_sparse_node_*"):
        shutil.copy(file, tmp_path / tag)
    norm, loaded = run_ranks(4, _load_universal, str(tmp_path), tag)[0]
    assert norm > 0.0 and torch.equal(loaded, params)
