"""A checkpoint that cannot be written leaves the one before as it was, and no rank waiting."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse.errors import CheckpointError
from tests.engines import build_config, build_engine, flat_params, train
from tests.ranks import run_ranks

COMMON = {"topology": {"ranks_per_node": 2}, "exclude": {"min_numel": 20}}
SPARSE = COMMON | {"method": "sparse_gradient", "compressor": {"density": 0.05}}
DENSE = COMMON | {"method": "dense"}  # its file of ours is below 4 KiB, ZeRO's and the model's are above
CASES = {
    "our file": (SPARSE, 3, 100, "ds_sparse_node_00001_rank_00001_mp_rank_00.safetensors: SafetensorError"),
    "the model": (DENSE, 0, 4096, "mp_rank_00_model_states.pt: RuntimeError"),
    "a partition": (DENSE, 1, 4096, "zero_pp_rank_1_mp_rank_00_optim_states.pt: RuntimeError"),
}


@contextlib.contextmanager
def _full_disk(rank: int, limit: int) -> Iterator[None]:
    """The kernel lets one rank write no file beyond `limit` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _save(engine: Any, folder: str, tag: str) -> str:
    try:
        engine.save_checkpoint(folder, tag)
    except CheckpointError as error:
        return str(error)
    return ""


def _files(folder: str) -> dict[str, bytes]:
    """The content of all files; the same for all ranks, none of which is writing."""
    dist.barrier()
    found = {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    dist.barrier()
    return found


def _run_out_of_space(folder: str, section: dict[str, Any], rank: int, limit: int) -> list[str]:
    def build() -> Any:
        return build_engine(build_config(optimizer="SGD0", section=section))

    engine = build()
    train(engine, 2)
    assert not _save(engine, folder, "first")
    kept, params = _files(folder), flat_params(engine)
    expected = train(engine, 2, start=2)
    messages = []
    for tag in ("second", "first"):  # a new one, and over the one that is there
        with _full_disk(rank, limit):
            messages.append(_save(engine, folder, tag))
        assert _files(folder) == kept
    other = build()
    other.load_checkpoint(folder)
    assert torch.equal(flat_params(other), params)
    assert all(torch.equal(a, b) for a, b in zip(train(other, 2, start=2), expected, strict=True))
    assert not _save(engine, folder, "second")  # and once there is space
    assert Path(folder, "latest").read_text() == "second"
    other.load_checkpoint(folder)
    assert torch.equal(flat_params(other), expected[-1])
    return messages


@pytest.mark.parametrize("what", CASES)
def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before_as_it_was(tmp_path: Path, what: str):
    section, rank, limit, cause = CASES[what]
    for messages in run_ranks(4, _run_out_of_space, str(tmp_path), section, rank, limit):
        for tag, message in zip(("second", "first"), messages, strict=True):
            assert message.startswith(f"the checkpoint '{tag}' in '{tmp_path}' was not saved, on rank {rank}: ")
            assert f"{cause}: " in message
            assert "What was saved before is still there. What to do: " in message
            assert message.count("on rank") == 1


def _save_where_it_cannot(folders: list[str]) -> list[str]:
    engine = build_engine(build_config(optimizer="SGD0", section=SPARSE))
    train(engine, 1)
    return [_save(engine, folder, "first") for folder in folders]


def test_a_folder_that_cannot_be_written_is_said_on_all_ranks(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken" / "latest").mkdir(parents=True)
    folders = [str(tmp_path / "file" / "below"), str(tmp_path / "taken")]
    for unmakeable, unmovable in run_ranks(4, _save_where_it_cannot, folders):
        assert all(f"on rank {rank}: {folders[0]}/first" in unmakeable for rank in range(4))
        assert "NotADirectoryError" in unmakeable
        assert f"on rank 0: {folders[1]}/latest: IsADirectoryError" in unmovable
    assert not list(tmp_path.rglob(".*.partial"))


def _load_broken(folder: str) -> tuple[str, str]:
    engine = build_engine(build_config(optimizer="SGD0", section=SPARSE))
    train(engine, 1)
    engine.save_checkpoint(folder)
    dist.barrier()
    partition = Path(folder, "global_step1", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    if dist.get_rank() == 0:
        partition.write_bytes(partition.read_bytes()[:-100])
    dist.barrier()
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011  (torch's own depends on its version)
        engine.load_checkpoint(folder)
    return caught.type.__name__, str(caught.value)


def test_a_partition_that_one_rank_of_each_node_cannot_read_stops_all(tmp_path: Path):
    results = run_ranks(4, _load_broken, str(tmp_path))
    kinds = [kind for kind, _ in results]
    assert kinds[0] == kinds[2] == "CheckpointError" and kinds[1] == kinds[3] != "CheckpointError"
    for _, message in results[::2]:
        assert f"the checkpoint in '{tmp_path}' was not loaded, on rank 1: {kinds[1]}: " in message
        assert f"; on rank 3: {kinds[3]}: " in message
