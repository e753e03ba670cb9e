"""Shared by all tests: one thread a process, and no JIT build of DeepSpeed's CPU ops."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # before any fork: a forked child must not inherit a running thread pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what the installed version of DeepSpeed cannot do; that it is refused is tested."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if (params.get("stage"), params.get("dtype")) == (0, "bf16"):
        from ds_sparse.adapter import versions

        if versions.spoils_bf16_at_stage_0():
            pytest.skip("bf16 at ZeRO stage 0 is refused with this version of DeepSpeed")
