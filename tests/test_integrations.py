"""The scripts of examples/integrations/ as their users start them, on CPU ranks that play a node each.

Nothing here looks into the processes: that compression was on is read from the scalars that a user sees.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.launch import ROOT, environment, free_port

pytestmark = pytest.mark.launcher

SCRIPTS = ROOT / "examples" / "integrations"
STEPS, FREEZE_STEP, STOP = 6, 3, 4


def _require(*packages: str) -> None:
    """Skips where a package is not installed; in CI, where all are, that fails."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and "DS_SPARSE_REQUIRE_INTEGRATIONS" not in os.environ:
        pytest.skip(f"needs {' and '.join(missing)}: pip install 'ds_sparse[integrations]'")
    assert not missing


def _config(folder: Path) -> str:
    """examples/integrations/ds_config.json for a run of few steps, which logs below `folder`."""
    config = json.loads((SCRIPTS / "ds_config.json").read_text())
    config["compressed_communication"]["sparse_momentum"] = {"freeze_step": FREEZE_STEP}
    config["tensorboard"]["output_path"] = str(folder)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


def _torchrun(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*command, "--master-port", str(free_port()), *arguments]


def _run(command: list[str], folder: Path) -> dict[str, list[float]]:
    """Runs a job to its end; returns the values of all TensorBoard scalars below `folder`, by tag."""
    done = subprocess.run(
        command, cwd=folder, env=environment() | {"PYTHONPATH": str(ROOT)}, timeout=250, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "compressed communication: 2 nodes x 1 ranks, sparse_momentum" in done.stdout
    (loss,) = re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)
    assert math.isfinite(float(loss))
    scalars: dict[str, list[float]] = {}
    for file in folder.glob("**/events.out.tfevents*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
    return scalars


def _assert_active(scalars: dict[str, list[float]]) -> None:
    """One exchange at each optimizer step, and those after the dense phase much smaller than dense."""
    assert scalars["Comm/exchanges"] == list(range(1, STEPS + 1))
    quotients = scalars["Comm/dense_over_wire"]
    assert max(quotients[:FREEZE_STEP]) <= 1 < 10 < min(quotients[FREEZE_STEP:])


ON_CPU = str(ROOT / "tests" / "on_cpu.py")
PLAIN = ["ds_sparse.run", ON_CPU, str(SCRIPTS / "plain_deepspeed.py"), "--steps", str(STEPS), "--deepspeed"]


def test_a_plain_script_through_the_deepspeed_launcher(tmp_path: Path) -> None:
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), "--module"]
    _assert_active(_run([*command, *PLAIN, "--deepspeed_config", _config(tmp_path)], tmp_path))


def test_a_plain_script_through_torchrun(tmp_path: Path) -> None:
    _assert_active(_run(_torchrun("-m", *PLAIN, "--deepspeed_config", _config(tmp_path)), tmp_path))


def test_a_plain_script_through_open_mpi(tmp_path: Path) -> None:
    """What differs: no variable tells a process its rank; DeepSpeed asks MPI."""
    _require("mpi4py")
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    command = ["deepspeed", "--launcher", "openmpi", "--hostfile", str(tmp_path / "hostfile")]
    # DeepSpeed would not take mpirun for one host, and mpirun must be told the network, and that root may use it.
    command += ["--force_multi", "--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command += ["--launcher_args", "--allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo", "--module"]
    _assert_active(_run([*command, *PLAIN, "--deepspeed_config", _config(tmp_path)], tmp_path))


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """Also with accumulation, with the Trainer's own scalars in the same TensorBoard, and resumed from a checkpoint."""
    _require("transformers", "accelerate")
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ["--max_steps", str(STEPS), "--save_steps", str(STOP), "--gradient_accumulation_steps", "2"]
    arguments += ["--per_device_train_batch_size", "4", "--report_to", "tensorboard", "--logging_steps", "1"]

    def train(folder: Path, *more: str) -> dict[str, list[float]]:
        folder.mkdir()
        command = _torchrun(ON_CPU, str(SCRIPTS / "hf_trainer.py"), "--deepspeed", _config(folder), "--use_cpu")
        return _run([*command, "--output_dir", str(folder / "trainer"), *arguments, *more], folder)

    whole = train(first)
    _assert_active(whole)
    assert len(whole["train/loss"]) == STEPS
    resumed = train(second, "--resume_from_checkpoint", str(first / "trainer" / f"checkpoint-{STOP}"))
    assert resumed["train/loss"] == whole["train/loss"][STOP:]
    assert resumed["Comm/residual_norm"] == whole["Comm/residual_norm"][STOP:]


def test_accelerate(tmp_path: Path) -> None:
    _require("accelerate")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--use_deepspeed"]
    command += ["--deepspeed_config_file", _config(tmp_path), "--main_process_port", str(free_port())]
    command += ["--module", "ds_sparse.run", ON_CPU, str(SCRIPTS / "accelerate_loop.py"), "--steps", str(STEPS)]
    _assert_active(_run(command, tmp_path))


def test_lightning(tmp_path: Path) -> None:
    _require("lightning")
    arguments = ["--config", _config(tmp_path), "--devices", "2", "--steps", str(STEPS), "--output", str(tmp_path)]
    _assert_active(_run(_torchrun(ON_CPU, str(SCRIPTS / "lightning_trainer.py"), *arguments), tmp_path))
