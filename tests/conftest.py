"""Shared by all tests: one thread a process, and no JIT build of DeepSpeed's CPU ops."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)  # before any fork: a forked child must not inherit a running thread pool
