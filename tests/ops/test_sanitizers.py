"""The CPU kernels and the shim under AddressSanitizer and UndefinedBehaviorSanitizer.

A sanitizer's run time must be loaded before anything else, so a child process runs the work with LD_PRELOAD.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .shim_launcher import SANITIZE, compiler

ROOT = Path(__file__).parents[2]


def runtime() -> str | None:
    """Path of libasan, or None where the compiler has none."""
    if compiler() is None:
        return None
    found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) and os.path.exists(found) else None


pytestmark = pytest.mark.skipif(runtime() is None, reason="the compiler has no AddressSanitizer")

CODECS = """
import torch
from ops.layout import VALUE_BITS
from tests.ops.codec_battery import assert_indices_like_reference, assert_values_like_reference, layouts
def check_codecs(tier, layouts):
    for layout in layouts:
        assert_indices_like_reference(tier, layout, torch.Generator().manual_seed(1))
    for dtype in VALUE_BITS:
        for name in ("gaussian", "extremes", "nans"):
            for k in (0, 1, 127, 999):
                assert_values_like_reference(tier, name, k, dtype)
"""
CPU = (
    CODECS
    + """
from ops.cpu import build, native
path, why = build.library(("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"))
assert path is not None, why
from tests.ops.battery import Case, assert_like_reference, topk, mstopk, chunked
base = native.load(path)
for isa in base.variants:
    for threads, guess in ((1, None), (3, 0)):
        tier = native.NativeTier(base.library, isa, threads, guess)
        for name in ("gaussian", "ties", "non_finite", "ascending"):
            for n, k in ((1, 1), (1000, 10), (20011, 200), (20011, 20011)):
                for form in ({"momentum": 0.9}, {"grad": "bf16"}, {"grad": "fp16", "decay": 0.5}):
                    assert_like_reference(tier, Case(name, n, **form), topk(k))
                assert_like_reference(tier, Case(name, n), mstopk(k, 9, 4))
                assert_like_reference(tier, Case(name, n), chunked(3, 100))
        assert_like_reference(tier, Case("ascending", 150_000), topk(100))
    check_codecs(tier, layouts())
print("clean")
"""
)
SHIM = f"""{CODECS}
from ops.cuda.pipeline import CudaTier
from tests.ops.battery import Case, assert_like_reference, topk, mstopk, chunked
from tests.ops.shim_launcher import ShimLauncher
launcher = ShimLauncher(flags={SANITIZE!r})
for settings in ({{}}, {{"guess": 0x3F000000, "capacity": 99}}):
    tier = CudaTier(launcher, **settings)
    for n, k in ((1, 1), (1000, 10), (9001, 90)):
        assert_like_reference(tier, Case("gaussian", n, momentum=0.9), topk(k))
assert_like_reference(CudaTier(launcher), Case("gaussian", 40_001, momentum=0.9), topk(400))
assert_like_reference(CudaTier(launcher), Case("ties", 5001, momentum=0.9), chunked(3, 1000))
assert_like_reference(CudaTier(launcher), Case("ties", 5001, momentum=0.9), mstopk(50, 9, 4))
check_codecs(CudaTier(launcher), layouts())
print("clean")
"""


def run_sanitized(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime() or "",
        # Python and torch leak on purpose at exit; fibers change stacks, which confuses one check.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "DS_SPARSE_CACHE": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("code", [CPU, SHIM], ids=["cpu", "shim"])
def test_clean_under_sanitizers(code: str, tmp_path: Path) -> None:
    done = run_sanitized(code, tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr[-3000:]


@pytest.mark.slow
def test_the_sanitizer_sees_an_overrun(tmp_path: Path) -> None:
    """The control: one store behind the end of the candidates' buffer is reported with file and line."""
    broken = """from tests.ops.shim_launcher import cuda_source
def broken(name):
    text = cuda_source(name)
    return text.replace("out_values[at] =", "out_values[at + s.k] =") if name == "select.cu" else text
launcher = ShimLauncher(source=broken, """
    code = SHIM.replace("launcher = ShimLauncher(", broken)
    done = run_sanitized(code, tmp_path)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr
