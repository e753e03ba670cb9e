"""Plants bugs in the kernels and counts how many the tests notice: a test suite is worth what it catches.

    python -m tests.ops.mutate            # all bugs
    python -m tests.ops.mutate emit       # those whose name contains "emit"

Each bug replaces a piece of a .cu source; the changed source runs in the shim through a short version of the battery.
A bug is caught when any case differs from the reference, or the shim reports a deadlock or a misuse. The last line says
"N of M caught"; the exit status is 1 when one that should be caught is not.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ops.cuda.pipeline import CudaTier

from .battery import Case, assert_like_reference, chunked, mstopk, topk
from .shim_launcher import ShimLauncher, cuda_source

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    visible: bool = True  # False: the shim cannot show it, and the reason stands beside the bug


BUGS = [
    Bug("stream: no barrier after the ticket", "stream.cu",
        "    __syncthreads();\n    u32 tile = shared_tile;", "    u32 tile = shared_tile;"),
    Bug("stream: tile by block number, not by ticket", "stream.cu",
        "shared_tile = atomicAdd(&state->stream_ticket, 1u)", "shared_tile = gridDim.x - 1 - blockIdx.x"),
    Bug("stream: no barrier before the scan of the rows", "stream.cu",
        "    __syncthreads();\n    if (warp == 0) {", "    if (warp == 0) {"),
    Bug("stream: no barrier after the scan of the rows", "stream.cu",
        "        if (lane == 0 && tile == gridDim.x - 1) state->total = before + own;\n    }\n    __syncthreads();",
        "        if (lane == 0 && tile == gridDim.x - 1) state->total = before + own;\n    }"),
    Bug("stream: strict comparison with the guess", "stream.cu", "key_of(a[4 * g + c]) >= guess",
        "key_of(a[4 * g + c]) > guess", False),  # costs a second look at most: no result hangs on the guess
    Bug("stream: zeroes what does not fit the buffer", "stream.cu", "if (at < capacity) {", "{ if (at < capacity)"),
    Bug("stream: one entry too many in the buffer", "stream.cu", "at < capacity", "at + 1 < capacity"),
    Bug("stream: the total is another tile's", "stream.cu", "tile == gridDim.x - 1", "tile == 0"),
    Bug("look-back: own sum left out", "device.cuh", "TILE_UP_TO | (before + own)", "TILE_UP_TO | before"),
    Bug("look-back: stops one tile late", "device.cuh", "lane <= stop", "lane < stop"),
    Bug("look-back: does not wait", "device.cuh", "while (__any_sync(FULL_WARP, word == TILE_EMPTY))", "if (false)"),
    Bug("look-back: never reads again", "device.cuh", "if (at >= 0) word = tiles[at];\n        }", "}"),
    Bug("look-back: half the warp summed", "device.cuh", "u32 step = WARP / 2; step;", "u32 step = WARP / 4; step;"),
    Bug("scan: one step short", "device.cuh", "step < WARP; step *= 2", "step < WARP / 2; step *= 2"),
    Bug("scan: wrong mask", "device.cuh", "__shfl_up_sync(FULL_WARP, x, step)", "__shfl_up_sync(0xffffu, x, step)"),
    Bug("digit: no barrier between the warps' sums", "device.cuh",
        "up_to;\n    __syncthreads();\n    for (u32 w", "up_to;\n    for (u32 w"),
    Bug("digit: bound off by one", "device.cuh", "above < rank && rank <= up_to", "above <= rank && rank < up_to"),
    Bug("keys: NaN payloads rank", "device.cuh", "key < KEY_NAN ? key : KEY_NAN", "key"),
    Bug("keys: the sign counts", "device.cuh", "__float_as_uint(x) & 0x7fffffffu", "__float_as_uint(x)"),
    Bug("count: shared counts not cleared", "select.cu", "counts[b] = 0;", "(void)0;"),
    Bug("count: no barrier before the flush", "select.cu",
        "    }\n    __syncthreads();\n    for (u32 b = t; b < BINS; b += THREADS)\n        if",
        "    }\n    for (u32 b = t; b < BINS; b += THREADS)\n        if"),
    Bug("count: global counts not cleared for the next level", "select.cu", "atomicExch(&state->histogram[b], 0u)",
        "state->histogram[b]"),
    Bug("count: the first block decides", "select.cu", "== gridDim.x - 1", "== 0"),
    Bug("count: the prefix is not looked at", "select.cu", "first_level || key >> (shift + width) == prefix", "true"),
    Bug("count: no fence before the ticket", "select.cu", "__threadfence();  // my counts", "// my counts",
        False),  # memory order: the shim is sequentially consistent
    Bug("put back: forgets the velocity", "select.cu",
        "if (s.velocity) s.velocity[s.indices[j]] = s.velocities[j];", ""),
    Bug("put back: after a good guess too", "select.cu", "if (use_candidates(s, state)) return;", ""),
    Bug("emit: ties from the second on", "select.cu", "u32 start = take_first ? 0", "u32 start = take_first ? 1"),
    Bug("emit: rejects are not put back", "select.cu", "if (take != of_candidates) {", "if (take && !of_candidates) {"),
    Bug("emit: one tie too many", "select.cu", "band_at - start < wanted)", "band_at - start <= wanted)"),
    Bug("emit: the block that is late reads the next ticket", "select.cu",
        "    for (;;) {\n        __syncthreads();\n", "    for (;;) {\n", False),  # every path between has a barrier
    Bug("emit: returns before the barrier", "select.cu",
        "        __syncthreads();\n        u32 tile = shared_tile;", "        u32 tile = shared_tile;"),
    Bug("chunked: counts of the level before", "chunked.cu", "counts[b] = 0;", "if (level == 0) counts[b] = 0;"),
    Bug("chunked: elements behind the end count", "chunked.cu", "if (inside && (level", "if ((level",
        False),  # they count as zeros, the smallest key: that moves no rank
    Bug("chunked: rank of the level before", "chunked.cu", "*rank = found[1];", ""),
    Bug("accumulate: fused decay", "accumulate.cuh", "s.decay == 1.0f ? *a : __fmul_rn(s.decay, *a)", "*a"),
    Bug("accumulate: tail reads past the end", "accumulate.cuh", "first + 3 < s.n) {\n        float4 r",
        "first < s.n) {\n        float4 r", False),  # reads what is then ignored: the sanitizers' business
]  # fmt: skip


def battery(launcher: ShimLauncher) -> None:
    """Raises when the kernels are wrong: the shortest set of cases that takes every path."""
    for seed in range(2):
        launcher.seed, launcher.resident = seed, 1 + 39 * seed  # 40: a look-back reaches beyond one warp's window
        sampled, bad = CudaTier(launcher), CudaTier(launcher, guess=0x3F000000, capacity=999)
        exact = CudaTier(launcher, guess=0x40000000, capacity=4000)  # a key that occurs among the ties
        assert_like_reference(exact, Case("ties", 9001), topk(3000))
        assert_like_reference(sampled, Case("gaussian", 9001, momentum=0.9, decay=0.5), topk(90))
        assert_like_reference(sampled, Case("non_finite", 5001), topk(5))
        assert_like_reference(bad, Case("ties", 20_001, momentum=0.9), topk(700))
        assert_like_reference(bad, Case("gaussian", 20_001, momentum=0.9), topk(700))
        assert_like_reference(sampled, Case("gaussian", 200_001), topk(2000))
        assert_like_reference(sampled, Case("ties", 9001), mstopk(300, 12, 5))
        assert_like_reference(sampled, Case("ties", 9001, decay=0.5), chunked(30, 1000))
        assert_like_reference(sampled, Case("gaussian", 9001, momentum=0.9), chunked(30, 1000))
    full = CudaTier(launcher, guess=0, capacity=9001)
    assert_like_reference(full, Case("gaussian", 9001), topk(9001))
    assert int(assert_like_reference(full, Case("gaussian", 9001), topk(90)).candidates) == 9001
    _nan_payloads(launcher)


def _nan_payloads(launcher: ShimLauncher) -> None:
    """NaNs of several payloads tie: the two lowest indices are taken."""
    bits = torch.zeros(5000, dtype=torch.int32)
    bits[[10, 20, 4000]] = torch.tensor([0x7F800002, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    indices = CudaTier(launcher).topk_(bits.view(torch.float32), None, 2).indices.tolist()
    assert indices == [10, 20], indices


def try_out(bug: Bug) -> str | None:
    """How the bug was noticed, or None; in this process."""

    def source(name: str) -> str:
        text = cuda_source(name)
        if name == bug.file:
            if bug.old not in text:
                raise LookupError(f"{bug.name}: the source has changed, plant the bug anew")
            text = text.replace(bug.old, bug.new)
        return text

    try:
        battery(ShimLauncher(source=source, flags=("-DSHIM_STACK_BYTES=32768", "-w")))
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


def caught(bug: Bug) -> str | None:
    """The same in a process of its own, for a kernel gone wild may take its process with it."""
    command = [sys.executable, "-m", "tests.ops.mutate", "--only", bug.name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    if done.returncode < 0:
        return f"crash by signal {-done.returncode}"
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip() or None


def main() -> int:
    if sys.argv[1:2] == ["--only"]:
        print(try_out(next(bug for bug in BUGS if bug.name == sys.argv[2])) or "")
        return 0
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    battery(ShimLauncher())  # the control: without a bug nothing is reported
    bugs = [bug for bug in BUGS if wanted in bug.name]
    found = missed = 0
    for bug in bugs:
        how = caught(bug)
        found += how is not None
        missed += how is None and bug.visible
        verdict = f"caught  {how}" if how else "MISSED" if bug.visible else "not visible here"
        print(f"{bug.name:58} {verdict[:110]}", flush=True)
    print(f"{found} of {len(bugs)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
