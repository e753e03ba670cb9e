"""Compiling CUDA sources with the NVRTC wheels by ctypes: needs neither GPU nor driver nor toolkit.

pip install nvidia-cuda-nvrtc-cu12   # the last to know sm_70
pip install nvidia-cuda-nvrtc        # CUDA 13: sm_75 and up
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

WHEEL_FOLDERS = {"12": ("cuda_nvrtc/lib",), "13": ("cu13/lib",)}  # below the folder of the namespace package nvidia


def find_library(major: str) -> Path | None:
    """libnvrtc of that CUDA version: in $DS_SPARSE_NVRTC (a folder that holds nvidia/) or among installed packages."""
    roots = []
    if own := os.environ.get("DS_SPARSE_NVRTC"):
        roots.append(Path(own) / "nvidia")
    spec = importlib.util.find_spec("nvidia")
    if spec is not None and spec.submodule_search_locations:
        roots += [Path(p) for p in spec.submodule_search_locations]
    for root in roots:
        for folder in WHEEL_FOLDERS[major]:
            found = root / folder / f"libnvrtc.so.{major}"
            if found.exists():
                return found
    return None


@dataclass
class Compiled:
    ok: bool
    log: str
    cubin_bytes: int

    def spilled_bytes(self) -> dict[str, int]:
        """Spill stores and loads of each kernel, from ptxas' report."""
        kernels = re.findall(r"Compiling entry function '(\w+)'", self.log)
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", self.log)
        assert len(kernels) == len(spills), self.log
        return {kernel: int(stores) + int(loads) for kernel, (stores, loads) in zip(kernels, spills, strict=True)}


class Nvrtc:
    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(os.fspath(path))

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._check(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self.library.nvrtcGetSupportedArchs(numbers))
        return list(numbers)

    def compile(self, source: str, options: list[str]) -> Compiled:
        """To a cubin, so that ptxas runs too."""
        program = ctypes.c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        )
        encoded = [option.encode() for option in options]
        status = self.library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        size = ctypes.c_size_t()
        self._check(self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._check(self.library.nvrtcGetProgramLog(program, log))
        cubin = ctypes.c_size_t()
        if status == 0:
            self._check(self.library.nvrtcGetCUBINSize(program, ctypes.byref(cubin)))
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return Compiled(status == 0, log.value.decode(), cubin.value)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC returned {status}")
