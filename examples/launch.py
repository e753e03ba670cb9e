"""Starts a training script through the `deepspeed` launcher, as 4 ranks on this machine."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4


class JobError(RuntimeError):
    """A job ended with another exit status than 0; `status` is it, `output` what it printed when that was kept."""

    def __init__(self, command: Sequence[str], status: int, output: str) -> None:
        super().__init__(f"{' '.join(command)} ended with exit status {status}\n{output}".rstrip())
        self.status, self.output = status, output


def free_port() -> int:
    """A port that nobody listens on, so that two jobs do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """For the launcher: this interpreter's commands first, and no GPU search where there are not enough of them."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    if torch.cuda.device_count() < RANKS:
        env["DS_ACCELERATOR"] = "cpu"
        env["OMP_NUM_THREADS"] = "1"  # the ranks share the cores; more threads would only wait for each other
    return env


def launch(arguments: Sequence[str], result: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Runs `deepspeed ARGUMENTS --result RESULT` and returns the result, with the seconds it took as `wall_seconds`.

    Args:
        arguments: the script and its arguments; options of the launcher may stand before them.
        quiet: keep the job's output instead of passing it on.

    Raises:
        JobError: the job failed, or wrote no result.
    """
    result.unlink(missing_ok=True)
    command = ["deepspeed", "--num_accelerators", str(RANKS), "--master_port", str(free_port())]
    command += [*arguments, "--result", str(result)]
    if not quiet:
        print(f"\n=== {' '.join(command)}\n", flush=True)
    begun = time.perf_counter()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False, text=True, **pipe)
    if done.returncode or not result.exists():
        raise JobError(command, done.returncode, done.stdout or "")
    return {**json.loads(result.read_text()), "wall_seconds": time.perf_counter() - begun}
