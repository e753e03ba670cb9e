"""Everything that needs a CUDA GPU, in under eight minutes, from a plain checkout.

    python -m benchmarks.gpu_suite                  # tests, compute-sanitizer where it is present, benchmark
    python -m benchmarks.gpu_suite --skip-tests --json benchmarks/results/NAME.json

Needs torch, cupy, numpy and pytest; neither deepspeed nor an installed package. Prints a short table last and writes
JSON. Without a GPU or CuPy it says so and does nothing else (exit status 0).

The floor is what the measured copy bandwidth makes of 12 bytes an element (read residual and grad, write residual).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the kernels beside this file, installed or not

import ops  # noqa: E402

DENSITIES = (0.001, 0.01, 0.05)
SECONDS = 480
CODEC_ELEMENTS = 1 << 26  # the codecs are measured at this size alone
# Small sizes: compute-sanitizer slows kernels by orders of magnitude.
SANITIZED = """
import torch, ops
for n in (7, 5000, 70_001):
    residual, grad = torch.randn(n, device="cuda"), torch.randn(n, device="cuda").bfloat16()
    velocity = torch.zeros(n, device="cuda")
    ops.ef_topk_(residual, grad, n // 7, momentum=0.9, velocity=velocity)
    ops.ef_topk_(torch.ones(n, device="cuda"), grad.float(), n // 2)
    ops.mstopk_(residual, n // 7, grad=grad)
    selection = ops.chunked_topk_(residual, grad, 3, 1000)
    ops.scatter_add_(residual, selection.indices, selection.values)
    for encoding in ("int32", "elias_fano", "bitmap"):
        encoded = ops.encode_indices(selection.indices, n, encoding)
        ops.decode_indices(encoded, selection.indices.numel(), n, encoding)
        ops.decode_indices(encoded.fill_(255), selection.indices.numel(), n, encoding)
    for dtype in ("fp32", "bf16", "fp16", "int8", "int4", "int2"):
        ops.decode_values(ops.encode_values_(residual.clone(), dtype), n, dtype)
torch.cuda.synchronize()
"""


def milliseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median device time of one call, by events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 1 GiB, read and write counted."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source)))


def torch_topk(residual: Tensor, grad: Tensor, k: int) -> None:
    residual.add_(grad)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    residual.index_fill_(0, indices, 0.0)


def mstopk_30_passes(residual: Tensor, grad: Tensor, k: int) -> None:
    """Thirty counts over the vector in torch operations, without the host ever reading one."""
    residual.add_(grad)
    for threshold in torch.linspace(0.1, 3.0, 30).tolist():
        torch.count_nonzero(residual.abs() >= threshold)


def codecs(n: int, density: float) -> dict[str, float]:
    """Milliseconds of encoding and decoding the payload of one selection: indices by encoding, values by dtype."""
    k = max(1, int(n * density))
    residual = torch.randn(n, device="cuda")
    values, indices, *_ = ops.ef_topk_(residual, torch.zeros_like(residual), k)
    rows: dict[str, Callable[[], object]] = {}
    for encoding in ("int32", "elias_fano", "bitmap"):
        encoded = ops.encode_indices(indices, n, encoding)
        rows[f"encode {encoding}"] = partial(ops.encode_indices, indices, n, encoding, out=encoded)
        rows[f"decode {encoding}"] = partial(ops.decode_indices, encoded.clone(), k, n, encoding)
    for dtype in ("fp32", "bf16", "fp16", "int8", "int4", "int2"):
        encoded = ops.encode_values_(values.clone(), dtype)
        rows[f"encode {dtype}"] = partial(ops.encode_values_, values.clone(), dtype, out=encoded)
        rows[f"decode {dtype}"] = partial(ops.decode_values, encoded.clone(), k, dtype)
    return {name: milliseconds(row) for name, row in rows.items()}


def measure(n: int, density: float, dtype: torch.dtype, bandwidth: float) -> dict[str, object]:
    k = max(1, int(n * density))
    start, grad = torch.randn(n, device="cuda"), torch.randn(n, device="cuda").to(dtype)
    residual = start.clone()
    rows: dict[str, Callable[[Tensor, Tensor, int], object]] = {
        "ours": ops.ef_topk_,
        "mstopk samplings=30": lambda r, g, k: ops.mstopk_(r, k, samplings=30, grad=g),
        "chunked": lambda r, g, k: ops.chunked_topk_(r, g, max(1, round(density * ops.CHUNK))),
    }
    if n <= 1 << 28:
        rows |= {"torch.topk": torch_topk, "MSTopK in torch": mstopk_30_passes}
    floor = 1e3 * (8 + grad.element_size()) * n / bandwidth
    medians = {}
    for name, step in rows.items():
        residual.copy_(start)
        medians[name] = milliseconds(partial(step, residual, grad, k), 10 if "torch" in name else 20)
    # What no implementation that passes 30 times over the vector can beat, however well its passes are fused.
    fused = floor + 1e3 * 30 * 4 * n / bandwidth
    return {"elements": n, "density": density, "grad": str(dtype), "floor_ms": floor, "fused_30_passes_ms": fused,
            "median_ms": medians}  # fmt: skip


def benchmark(deadline: float) -> dict[str, object]:
    bandwidth = copy_bandwidth()
    cases = []
    free = torch.cuda.mem_get_info()[0]
    for n in (1 << 20, 1 << 24, 1 << 26, 1 << 28, 1_000_000_000):
        for density in DENSITIES:
            for dtype in (torch.float32, torch.bfloat16):
                if 24 * n < free and time.monotonic() < deadline:
                    cases.append(measure(n, density, dtype, bandwidth))
            if n == CODEC_ELEMENTS and time.monotonic() < deadline:
                cases[-1]["codec_ms"] = codecs(n, density)
        torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "cases": cases,
    }


def run_tests() -> bool:
    command = [sys.executable, "-m", "pytest", "tests/ops/test_gpu.py", "-q", "--confcutdir=tests/ops", "-m", "gpu"]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def run_sanitizer() -> bool | None:
    """None where compute-sanitizer is not present."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not present: skipped")
        return None
    clean = True
    for check in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(f"compute-sanitizer {check}: {'clean' if done.returncode == 0 else done.stdout[-2000:]}")
        clean &= done.returncode == 0
    return clean


def print_table(results: dict[str, object]) -> None:
    print(f"\n{results['gpu']}, copy bandwidth {results['copy_bandwidth_gb_s']:.0f} GB/s; ms and (times the floor)")
    for case in results["cases"]:  # type: ignore[attr-defined]
        figures = "  ".join(f"{name} {ms:.3f} ({ms / case['floor_ms']:.2f})" for name, ms in case["median_ms"].items())
        bound = f"30 fused passes >= {case['fused_30_passes_ms']:.3f}"
        print(f"{case['elements'] / 1e6:8.1f}M {100 * case['density']:4g} % {case['grad'][6:]:9} {figures}  {bound}")
        for name, ms in case.get("codec_ms", {}).items():
            print(f"{'':22}{name:20} {ms:.3f} ms ({100 * ms / case['median_ms']['ours']:.1f} % of the selection)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "gpu_suite.json", help="where the figures go")
    args = parser.parse_args()
    tier = ops.backend_info()["cuda"]
    if tier["tier"] != "cupy":
        print(f"GPU suite skipped: {tier['reason']}")
        return 0
    deadline = time.monotonic() + SECONDS
    tests = None if args.skip_tests else run_tests()
    sanitizer = None if args.skip_tests else run_sanitizer()
    results = {**benchmark(deadline), "tests_passed": tests, "sanitizer_clean": sanitizer}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)
    return int(tests is False or sanitizer is False)


if __name__ == "__main__":
    raise SystemExit(main())
