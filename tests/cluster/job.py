"""What the launchers start on every host: `deepspeed --module tests.cluster.job --result FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch.distributed as dist

from examples.common import finish, start
from tests.cluster.training import train_measured


def main() -> None:
    """Trains for some steps; rank 0 writes what each rank saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    start(seed=0)
    mine = train_measured({"method": "sparse_gradient", "compressor": {"density": 0.05}})
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(everyone))
    finish()


if __name__ == "__main__":
    main()
