"""Builds the CUDA sources for the CPU (see shim/shim.h) and launches their kernels on CPU tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ops.cuda.launch import Argument, Module

SHIM = Path(__file__).parent / "shim"
CUDA = Path(__file__).parents[2] / "ops" / "cuda"
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DSHIM_STACK_BYTES=262144")
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')


class ShimError(AssertionError):
    """The shim found a deadlock, a divergence or another misuse."""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def cuda_source(name: str) -> str:
    """A source as it stands; the mutation check passes another function."""
    return (CUDA / name).read_text()


@dataclass
class ShimLauncher:
    """Launcher of :mod:`ops.cuda.launch`. ``seed`` and ``resident`` (blocks at a time) choose the schedule."""

    seed: int = 0
    resident: int = 3
    source: Callable[[str], str] = cuda_source
    flags: tuple[str, ...] = ("-DSHIM_STACK_BYTES=32768",)
    launches: int = 0
    _libraries: dict[Module, ctypes.CDLL] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        """Built libraries stay in the test run's own cache: rebuilt only when a source changes."""
        default = Path(tempfile.gettempdir()) / f"ds_sparse_shim_{os.getuid()}"
        folder = Path(os.environ.get("DS_SPARSE_SHIM_CACHE") or default)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def processors(self, device: torch.device) -> int:
        return 1

    def launch(
        self, module: Module, kernel: str, grid: int, block: int, arguments: Sequence[Argument], device: torch.device
    ) -> None:
        library = self._libraries.get(module) or self._libraries.setdefault(module, self.build(module))
        holders = [np.array(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(holders))(*(h.ctypes.data for h in holders))
        self.launches += 1
        message = library.shim_launch(
            kernel.encode(), grid, block, pointers, self.seed * 1_000_003 + self.launches, self.resident
        )
        if message:
            raise ShimError(f"{kernel}: {message.decode()}")

    def build(self, module: Module) -> ctypes.CDLL:
        texts = [f'#line 1 "{name}"\n{self.source(name)}' for name in module.sources]
        kernels = [name for text in texts for name in _KERNEL.findall(text)]
        table = "\n".join(
            f'    if (!std::strcmp(name, "{k}")) return shim::launch([](void** a) {{ shim::call({k}, a); }},'
            " grid, threads, args, seed, resident);"
            for k in kernels
        )
        unit = "\n".join(['#include "shim.h"', *texts]) + (
            '\n#line 1 "table"\nextern "C" const char* shim_launch(const char* name, unsigned grid, unsigned threads,'
            f" void** args, uint64_t seed, unsigned resident) {{\n{table}\n"
            '    return "no such kernel";\n}\n'
        )
        command = [compiler() or "g++", *FLAGS, *self.flags, *module.defines, f"-I{SHIM}"]
        headers = [path.read_text() for path in sorted(SHIM.glob("*.h"))]
        key = hashlib.sha256(repr((unit, command, headers)).encode()).hexdigest()[:20]
        target = self.folder / f"{key}.so"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                unit_file, partial = Path(scratch) / "unit.cpp", Path(scratch) / "unit.so"
                unit_file.write_text(unit)
                done = subprocess.run([*command, str(unit_file), "-o", str(partial)], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"the shim does not compile:\n{done.stderr[:4000]}")
                os.replace(partial, target)
        library = ctypes.CDLL(os.fspath(target))
        library.shim_launch.restype = ctypes.c_char_p
        pointers, unsigned = ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint
        library.shim_launch.argtypes = [ctypes.c_char_p, unsigned, unsigned, pointers, ctypes.c_uint64, unsigned]
        return library
