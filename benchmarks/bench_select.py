"""What the error-feedback selection costs, against one pass over the data and against what others do.

    python -m benchmarks.bench_select                                   # 25M elements, fp32, 0.1, 1 and 5 %
    python -m benchmarks.bench_select --elements 100e6 --densities 0.01 --json out.json

Each row is one whole step: residual += grad, select k, zero the emitted places. All rows of a case are timed in turn,
round by round, so that other load on the machine hits them alike; the medians of one run are compared with each other
and with the floor, ``torch.add(residual, grad, out=residual)``: 12 bytes an element in fp32.

"cold" calls from a thread that never called before: its candidate buffers have to be mapped first. "warm" does not.
The rows "torch.topk", "MSTopK in torch" (30 counts over the vector) and "DGC sampled" are written here from the
published procedures; DGC's count of emitted entries is not exact, as published.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the kernels beside this file, installed or not

import ops
from ops.cpu import chunked_numpy
from ops.types import Accumulation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS_A_ROW = 3.0  # a row that is slow gets fewer rounds than asked for, but never fewer than MIN_ROUNDS
MIN_ROUNDS = 3

Step = Callable[[Tensor, Tensor, int], object]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def ours(residual: Tensor, grad: Tensor, k: int) -> object:
    return ops.ef_topk_(residual, grad, k)


def ours_cold(residual: Tensor, grad: Tensor, k: int) -> object:
    thread = threading.Thread(target=ours, args=(residual, grad, k))
    thread.start()
    thread.join()
    return None


def ours_numpy(residual: Tensor, grad: Tensor, k: int) -> object:
    return chunked_numpy.topk_(residual, Accumulation(grad), k)


def ours_mstopk(residual: Tensor, grad: Tensor, k: int) -> object:
    return ops.mstopk_(residual, k, samplings=30, grad=grad)


def ours_chunked(residual: Tensor, grad: Tensor, k: int) -> object:
    return ops.chunked_topk_(residual, grad, max(1, round(k / residual.numel() * ops.CHUNK)))


def floor_of(grad32: Tensor, residual: Tensor, grad: Tensor, k: int) -> object:
    """The addition in fp32 whatever the gradient is: torch's mixed addition is far slower."""
    return torch.add(residual, grad32, out=residual)


def torch_topk(residual: Tensor, grad: Tensor, k: int) -> object:
    residual.add_(grad)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0.0
    return values, indices.int()


def np_argpartition(residual: Tensor, grad: Tensor, k: int) -> object:
    residual.add_(grad)
    r = residual.numpy()
    indices = np.argpartition(np.abs(r), len(r) - k)[len(r) - k :]
    values = r[indices]
    r[indices] = 0.0
    return values, indices.astype(np.int32)


def mstopk_in_torch(residual: Tensor, grad: Tensor, k: int) -> object:
    """Algorithm 1 of Shi et al. (2021) as it is usually written: one count over the vector per sampling."""
    residual.add_(grad)
    a = residual.abs()
    mean, top = a.mean(), a.max()
    low, high, k1, k2, upper, lower = 0.0, 1.0, 0, a.numel(), torch.inf, 0.0
    for _ in range(30):
        ratio = low + (high - low) / 2
        threshold = float(mean + ratio * (top - mean))
        count = int((a >= threshold).sum())
        if count <= k:
            high = ratio
            if count > k1:
                k1, upper = count, threshold
        else:
            low = ratio
            if count < k2:
                k2, lower = count, threshold
    first = torch.nonzero(a >= upper).flatten()
    band = torch.nonzero((a < upper) & (a >= lower)).flatten()
    indices = torch.cat([first, band[: k - k1]])
    values = residual[indices]
    residual[indices] = 0.0
    return values, indices.int()


def dgc_sampled(residual: Tensor, grad: Tensor, k: int) -> object:
    """Threshold from a 1 % strided sample, adapted until the count is within 0.8 .. 1.3 k (Lin et al., 2018)."""
    residual.add_(grad)
    a = residual.abs()
    sample = a[:: 100 if a.numel() > 100_000 else 1]
    wanted = max(1, int(k * sample.numel() / a.numel()))
    threshold = float(torch.topk(sample, wanted).values.min())
    for _ in range(10):
        mask = a >= threshold
        count = int(mask.sum())
        if count > 1.3 * k:
            threshold *= 1.1
        elif count < 0.8 * k:
            threshold *= 0.9
        else:
            break
    indices = torch.nonzero(mask).flatten()
    values = residual[indices]
    residual[indices] = 0.0
    return values, indices.int()


ROWS: dict[str, Step] = {
    "ours, warm": ours,
    "ours, cold": ours_cold,
    "ours, NumPy tier": ours_numpy,
    "ours, mstopk samplings=30": ours_mstopk,
    "ours, chunked": ours_chunked,
    "torch.topk": torch_topk,
    "DGC sampled": dgc_sampled,
    "np.argpartition": np_argpartition,
    "MSTopK in torch": mstopk_in_torch,
}


def measure(
    n: int, density: float, dtype: torch.dtype, rows: dict[str, Step], rounds: int, clock: Clock
) -> dict[str, float]:
    """Median milliseconds of each row for one case."""
    generator = torch.Generator().manual_seed(n)
    start = torch.randn(n, generator=generator)
    grad = torch.randn(n, generator=generator).to(dtype)
    residual = torch.empty_like(start)
    k = max(1, round(density * n))
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, step in rows.items():
            if len(times[name]) >= MIN_ROUNDS and sum(times[name]) > SECONDS_A_ROW:
                continue
            residual.copy_(start)
            begin = clock()
            step(residual, grad, k)
            times[name].append(clock() - begin)
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def table(n: int, density: float, dtype_name: str, medians: dict[str, float], floor_ms: float) -> str:
    width = 8 + torch.empty(0, dtype=DTYPES[dtype_name]).element_size()
    lines = [f"\n{n / 1e6:g}M elements, {dtype_name} gradient, density {100 * density:g} %  (floor {floor_ms:.2f} ms)"]
    lines.append(f"{'':28}{'ms':>10}{'x floor':>10}{'B/element *':>12}")
    for name, ms in medians.items():
        lines.append(f"{name:28}{ms:10.2f}{ms / floor_ms:10.2f}{12 * ms / floor_ms:12.1f}")
    lines.append(f"* bytes that the floor would have moved in that time; one pass needs {width}")
    return "\n".join(lines)


def processor() -> str:
    """The model as Linux names it, else the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def timing_parser(description: str, threads_help: str | None = None) -> argparse.ArgumentParser:
    """The options that every benchmark of the kernels has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--elements", type=float, nargs="+", default=[25e6])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    parser.add_argument("--threads", type=int, default=1, help=threads_help)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall",
                        help="cpu: time on the processor, for a machine that others use too (one thread)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def write_figures(args: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    """The cases, and the machine they were measured on, to `args.json` where it was given."""
    if args.json:
        machine = {"processor": processor(), "threads": args.threads, "clock": args.clock,
                   "torch": torch.__version__, "tier": ops.backend_info()["cpu"]["tier"]}  # fmt: skip
        args.json.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = timing_parser(__doc__ or "")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["fp32"])
    parser.add_argument("--rows", nargs="+", help=f"parts of the names of the rows to time, of: {', '.join(ROWS)}")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    rows = {name: step for name, step in ROWS.items() if not args.rows or any(part in name for part in args.rows)}
    cases = []
    print(f"cpu tier: {ops.backend_info()['cpu']['tier']}, {args.threads} thread(s), {args.clock} time")
    for n in map(int, args.elements):
        for density in args.densities:
            for dtype_name in args.dtypes:
                grad32 = torch.zeros(n)
                timed: dict[str, Step] = {"floor (torch.add)": partial(floor_of, grad32), **rows}
                medians = measure(n, density, DTYPES[dtype_name], timed, args.rounds, CLOCKS[args.clock])
                floor_ms = medians["floor (torch.add)"]
                print(table(n, density, dtype_name, medians, floor_ms), flush=True)
                cases.append({"elements": n, "density": density, "grad": dtype_name, "median_ms": medians,
                              "times_floor": {name: ms / floor_ms for name, ms in medians.items()}})  # fmt: skip
    write_figures(args, cases)


if __name__ == "__main__":
    main()
