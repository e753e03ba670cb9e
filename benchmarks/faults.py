"""What every rank sees of a fault, and how long it waits for it: 2 hosts x 2 ranks made of network namespaces.

    python -m benchmarks.faults

prints the table of docs/faults.md. tests/cluster/test_faults.py holds what it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.cluster import Cluster
from ds_sparse.links import Link
from tests.engines import build_config, build_engine, train
from tests.ranks import RankError

SAVED, FAULTY, STEPS = 3, 5, 8  # steps before the checkpoint, before the fault, and in all
CUT_SECONDS = 3.0  # of a cut that heals
VICTIM = 2  # global rank; the first of host 1
LONG, SHORT = 30.0, 4.0  # topology.timeout_seconds: long where nobody should have to wait for it
FAULTS = {  # -> what happens, timeout
    "none": ("none", LONG),
    "kill": (f"rank {VICTIM} is killed (SIGKILL) in the middle of an exchange", LONG),
    "cut and heal": (f"the link of host 1 is cut for {CUT_SECONDS:g} s", LONG),
    "cut": ("the link of host 1 is cut for good", SHORT),
}
SECTION = {
    "method": "sparse_gradient",
    "compressor": {"density": 0.05},
    "error_feedback": {"momentum": 0.9},
    "exchange": {"type": "all_gather"},
    "exclude": {"min_numel": 20},
    "fallback": "off",
}


class Seen(NamedTuple):
    """By one rank: the error of the step with the fault ("" for none), and the seconds until it came."""

    error: str
    message: str
    seconds: float


class Outcome(NamedTuple):
    """What each rank saw, None for one that died; and its parameters after every step where the job went on."""

    seen: list[Seen | None]
    histories: list[list[torch.Tensor]]


def _engine(fault: str) -> Any:
    section = SECTION | {"topology": {"timeout_seconds": FAULTS[fault][1]}}
    return build_engine(build_config(optimizer="SGD0", section=section))


def _inject(fault: str, cluster: Cluster) -> None:
    """Runs on every rank right before the step."""
    if fault == "kill" and dist.get_rank() == VICTIM:
        Link.start_gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    if fault.startswith("cut") and dist.get_rank() == 0:
        cluster.cut(1)
        if fault == "cut and heal":
            threading.Timer(CUT_SECONDS, cluster.heal, (1,)).start()


def _job(fault: str, cluster: Cluster, folder: str) -> list[torch.Tensor]:
    engine = _engine(fault)
    history = train(engine, SAVED)
    engine.save_checkpoint(f"{folder}/checkpoints")
    history += train(engine, FAULTY - SAVED, start=SAVED)
    dist.barrier()
    _inject(fault, cluster)
    error, started = ("", ""), time.perf_counter()
    try:
        history += train(engine, 1, start=FAULTY)
    except Exception as caught:
        error = type(caught).__name__, str(caught)
        raise
    finally:
        seen = Seen(*error, time.perf_counter() - started)
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    return history + train(engine, STEPS - FAULTY - 1, start=FAULTY + 1)


def run_fault(cluster: Cluster, fault: str, folder: str) -> Outcome:
    """A job of 2 x 2 ranks that meets one of `FAULTS` at a step; its checkpoint stays in `folder`."""
    histories: list[list[torch.Tensor]] = []
    with contextlib.suppress(RankError):
        histories = cluster.run_ranks(2, _job, fault, cluster, folder)
    cluster.heal(1)
    files = [Path(folder, f"{rank}.json") for rank in range(4)]
    return Outcome([Seen(*json.loads(file.read_text())) if file.exists() else None for file in files], histories)


def _resumed(folder: str) -> list[torch.Tensor]:
    engine = _engine("none")
    engine.load_checkpoint(f"{folder}/checkpoints")
    return train(engine, STEPS - SAVED, start=SAVED)


def resume(cluster: Cluster, folder: str) -> list[list[torch.Tensor]]:
    """The parameters of each rank after every step from the checkpoint on, in a new job."""
    return cluster.run_ranks(2, _resumed, folder)


def main() -> None:
    """Prints the table."""
    print("| fault | timeout s | rank (host) | what it saw | after s |\n|---|---|---|---|---|")
    for fault, (description, timeout) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2) as cluster:
            for rank, seen in enumerate(run_fault(cluster, fault, folder).seen):
                what, seconds = ("died", "") if seen is None else (_short(seen), f"{seen.seconds:.1f}")
                print(f"| {description} | {timeout:g} | {rank} ({rank // 2}) | {what} | {seconds} |", flush=True)


def _short(seen: Seen) -> str:
    return f"{seen.error}: {seen.message.partition(': [')[0]}" if seen.error else "the step went on"


if __name__ == "__main__":
    main()
