"""Runs a script that is written for GPUs on CPU ranks: `... tests/on_cpu.py SCRIPT ARGUMENTS`.

Started by the launchers in test_integrations.py. What stands here is about the machine, not about ds_sparse.
"""

from __future__ import annotations

import collections
import runpy
import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)  # or it compiles, for minutes, what nobody calls

if "lightning" in sys.argv[1]:
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed as strategy

    strategy.CUDAAccelerator = CPUAccelerator  # it accepts no other device
    CPUAccelerator.get_parallel_devices = lambda count: [torch.device("cpu", i) for i in range(count)]  # wants indices

if "accelerate" in sys.argv[1]:
    from accelerate import PartialState

    PartialState(cpu=True)  # or it looks for a GPU, finds none, and takes this for a job of one process

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # gloo's threads can abort a process that ends without it
