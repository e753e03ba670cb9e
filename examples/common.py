"""What the example scripts share: preparing the machine, counting the traffic of all ranks, writing the result."""

import argparse
import collections
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

TRAFFIC = ("inter_node_bytes", "intra_node_bytes", "dense_bytes")


def add_common_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """--deepspeed and --deepspeed_config, what the launcher passes, and what every example has."""
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the data")
    parser.add_argument("--result", type=Path, help="write the outcome to this JSON file")
    parser.add_argument("--log-every", type=int, default=20, help="steps between progress lines")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)


def start(seed: int) -> None:
    """Join the job; seed this process."""
    if get_accelerator().device_name() == "cpu":
        # On a CPU, joining would first compile a shared-memory kernel for about a minute, of which only inference
        # makes use. DeepSpeed compiles what this table calls compatible: call nothing compatible.
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    deepspeed.init_distributed()
    torch.manual_seed(seed)


def finish() -> None:
    """Leave the job in order: an open process group can abort the process at exit."""
    dist.barrier()
    dist.destroy_process_group()


def across_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sum each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


class Traffic:
    """Adds up what this rank sent, and apart from it what it sent in steps that were compressed.

    Follows `engine.compressed_communication`; counts nothing for an engine without it.
    """

    def __init__(self, engine: Any) -> None:
        handle = getattr(engine, "compressed_communication", None)
        self.stats = handle.stats if handle is not None else None
        self.device = engine.device
        self.compressed = dict.fromkeys(("steps", "inter_node_bytes", "dense_bytes"), 0)

    @property
    def density(self) -> float:
        """Density of the last step: 1 when everything was sent."""
        return self.stats.last.density if self.stats else 1.0

    def after_step(self) -> None:
        """Call once after every optimizer step."""
        if self.stats and self.density < 1:
            self.compressed["steps"] += 1
            self.compressed["inter_node_bytes"] += self.stats.last.inter_node_bytes
            self.compressed["dense_bytes"] += self.stats.last.dense_bytes

    def last_step(self) -> dict[str, float]:
        """Bytes of the last step, summed over all ranks. Every rank must call it."""
        counts = [getattr(self.stats.last, name) if self.stats else 0 for name in TRAFFIC]
        return dict(zip(TRAFFIC, across_ranks(counts, self.device), strict=True))

    def summary(self) -> dict[str, Any]:
        """Bytes of the whole run, and of its compressed part, summed over all ranks. Every rank must call it."""
        counts = [getattr(self.stats.total, name) if self.stats else 0 for name in TRAFFIC]
        parts = [self.compressed["inter_node_bytes"], self.compressed["dense_bytes"]]
        *totals, sent, dense = (int(x) for x in across_ranks(counts + parts, self.device))
        compressed = {"steps": self.compressed["steps"], "inter_node_bytes": sent, "dense_bytes": dense}
        return {**dict(zip(TRAFFIC, totals, strict=True)), "compressed_phase": compressed}


def progress(traffic: Traffic, step: int, steps: int, loss: float, speed: str) -> str:
    """The line that rank 0 prints. Every rank must call it."""
    sent = traffic.last_step()
    quotient = f"{sent['dense_bytes'] / sent['inter_node_bytes']:5.1f}x" if sent["inter_node_bytes"] else "    -"
    return (
        f"step {step:4d}/{steps}  loss {loss:.4f}  {speed}  density {traffic.density:<6.4g}"
        f"  across nodes {sent['inter_node_bytes'] / 1e6:7.3f} MB/step  dense/wire {quotient}"
    )


def log_loss(engine: Any, loss: float) -> None:
    """Writes the loss to DeepSpeed's monitors, of which rank 0 has some; DeepSpeed itself does not."""
    engine.monitor.write_events([("Train/Samples/train_loss", loss, engine.global_samples)])


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Rank 0 writes the result; a missing folder is made."""
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
