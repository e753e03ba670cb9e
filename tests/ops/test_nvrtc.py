"""Every kernel compiles to machine code for every supported GPU, without spilling registers; no GPU needed."""

from __future__ import annotations

import os

import pytest
import torch

from ops.cuda.codec import CODEC
from ops.cuda.launch import Module
from ops.cuda.pipeline import SELECT, accumulating

from .nvrtc import Nvrtc, find_library
from .shim_launcher import cuda_source

ARCHITECTURES = {"12": (70, 75, 80, 90), "13": (75, 80, 90, 100, 120)}
MODULES = [
    SELECT,
    CODEC,
    *(accumulating(d, v) for d in (torch.float32, torch.bfloat16, torch.float16) for v in (False, True)),
]
REQUIRED = os.environ.get("DS_SPARSE_REQUIRE_NVRTC")  # set in CI: a missing wheel is then a failure, not a skip


# The oldest and the newest architecture at every run, those between them in the slow one.
FAST = (("12", 70), ("13", 120))
CASES = [
    pytest.param(major, arch, marks=() if (major, arch) in FAST else pytest.mark.slow)
    for major, arches in ARCHITECTURES.items()
    for arch in arches
]


@pytest.mark.parametrize(("major", "arch"), CASES)
def test_kernels_compile_without_spills(major: str, arch: int) -> None:
    path = find_library(major)
    if path is None:
        package = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
        if REQUIRED:
            pytest.fail(f"{package} is not installed")
        pytest.skip(f"{package} is not installed: pip install ds_sparse[kernels]")
    compiler = Nvrtc(path)
    assert arch in compiler.architectures()
    for module in MODULES:
        compiled = compiler.compile(_source(module), [f"-arch=sm_{arch}", "-std=c++17", "--ptxas-options=-v",
                                                      *module.defines])  # fmt: skip
        assert compiled.ok, compiled.log
        assert compiled.cubin_bytes > 0
        warnings = [x for x in compiled.log.splitlines() if "warning" in x and "Architectures prior to" not in x]
        assert not warnings, warnings
        spills = compiled.spilled_bytes()
        assert spills and not any(spills.values()), (module, spills)


def test_an_error_is_reported_at_its_place_in_the_source() -> None:
    path = find_library("13") or find_library("12")
    if path is None:
        pytest.skip("no NVRTC wheel is installed: pip install ds_sparse[kernels]")
    compiled = Nvrtc(path).compile(_source(SELECT) + "\nint broken = ;\n", ["-arch=sm_80"])
    assert not compiled.ok and "scatter.cu(" in compiled.log


def _source(module: Module) -> str:
    return "\n".join(f'#line 1 "{name}"\n{cuda_source(name)}' for name in module.sources)
