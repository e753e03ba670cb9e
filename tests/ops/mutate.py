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
from ops.layout import VALUE_BITS, index_layout

from .battery import Case, assert_like_reference, chunked, mstopk, topk
from .codec_battery import assert_indices_like_reference, assert_values_like_reference, layouts
from .shim_launcher import ShimError, ShimLauncher, cuda_source

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
    Bug("fields: cut at the end of a word", "indices.cu", "shift < 0 ? field >> -shift", "shift < 0 ? 0"),
    Bug("fields: the mask is one bit", "indices.cu", "(u32)((1ull << width) - 1ull)", "(u32)(1ull << width)"),
    Bug("fields: across two words", "indices.cu", "if (shift + width > 32) both", "if (shift + width > 33) both"),
    Bug("encode: chunks are not checked", "indices.cu", "if (s.k_c) sound = sound &&", "if (false) sound = sound &&"),
    Bug("encode: the order is not checked", "indices.cu", "index < s.n && (i == 0 || indices[i - 1] < index)",
        "index < s.n"),
    Bug("bits: stored, not joined", "indices.cu", "atomicOr(&out[word], set)", "out[word] = set"),
    Bug("bits: joined with another word's", "indices.cu", "lane >= by && other_word == word", "lane >= by"),
    Bug("bits: the last lane does not store", "indices.cu", "lane == WARP - 1 || next != word", "next != word"),
    Bug("read: unused bits are not reported", "indices.cu", "*corrupt = 1;\n        word &=", "word &="),
    Bug("read: unused bits are kept", "indices.cu", "word &= (1u << s.bits % 32) - 1u;", "",
        False),  # reported as corrupt all the same, and beyond k nothing is written
    Bug("read: the count is not compared", "indices.cu", "before + own != s.k", "false"),
    Bug("read: the count of another tile", "indices.cu", "tile == gridDim.x - 1 && before", "tile == 0 && before"),
    Bug("read: the fields' pad is not looked at", "indices.cu", "if (tile == 0 && !field_pad_is_zero(s, fields))",
        "if (false)"),
    Bug("read: no barrier after the ticket", "indices.cu",
        "    __syncthreads();\n    u32 tile = shared_tile, at", "    u32 tile = shared_tile, at"),
    Bug("read: no barrier between the warps' sums", "indices.cu",
        "sums[warp] = up_to;\n    __syncthreads();", "sums[warp] = up_to;"),
    Bug("read: no barrier before the list is read", "indices.cu",
        "    __syncthreads();\n    for (u32 j = t; j < own", "    for (u32 j = t; j < own"),
    Bug("read: the number is not subtracted", "indices.cu", "(bit - i * s.step)", "bit"),
    Bug("check: twice the same passes", "indices.cu", "i > 0 && indices[i - 1] >= indices[i]",
        "i > 0 && indices[i - 1] > indices[i]"),
    Bug("check: n is not looked at", "indices.cu", "indices[i] >= n || ", ""),
    Bug("replace: corrupt indices stay", "indices.cu", "if (i < k && *corrupt)", "if (false)"),
    Bug("halves: ties away from even", "values.cu", "0x7fffu + (magnitude >> 16 & 1u)", "0x8000u"),
    Bug("halves: too large becomes infinite", "values.cu", "rounded < inf ? rounded : inf - 1", "rounded"),
    Bug("halves: subnormals as if normal", "values.cu", "magnitude < 0x38800000u", "magnitude < 0x33000000u"),
    Bug("halves: NaN keeps its sign", "values.cu", "return nan;", "return nan | (bits >> 16 & 0x8000u);"),
    Bug("scale: half the warp looked at", "values.cu", "u32 by = WARP / 2; by;", "u32 by = WARP / 4; by;"),
    Bug("scale: may overflow", "values.cu", "absmax < LARGEST_ABSMAX ? absmax : LARGEST_ABSMAX", "absmax"),
    Bug("scale: denormal", "values.cu", "scale < __uint_as_float(SMALLEST_SCALE) ? 0.0f : scale", "scale"),
    Bug("scale: Inf is a size", "values.cu", "if (absmax >= 0x7f800000u) return", "if (absmax > 0x7f800000u) return"),
    Bug("codes: of a block without scale", "values.cu", "if (!(scale > 0.0f)) return 0;", ""),
    Bug("codes: no pad", "values.cu", "if (at >= ((u64)k * width + 31) / 32 * 4) return;", "if (first >= k) return;"),
    Bug("codes: two bits a byte", "values.cu", "u64 at = first * width / 8;", "u64 at = first / 4;"),
    Bug("lost: twice what was sent", "values.cu", "__fsub_rn(x[c], level(code, width, scale))",
        "__fsub_rn(x[c], 2.0f * level(code, width, scale))"),
]  # fmt: skip


CODEC_FILES = ("indices.cu", "values.cu")


def codec_battery(launcher: ShimLauncher) -> None:
    """Raises when the codecs are wrong."""
    for seed in range(2):
        launcher.seed, launcher.resident = seed, 1 + 39 * seed
        for layout in layouts():
            assert_indices_like_reference(CudaTier(launcher), layout, torch.Generator().manual_seed(seed))
        for dtype in VALUE_BITS:
            for name in ("gaussian", "non_finite", "denormals", "extremes", "halfway", "nans"):
                for k in (1, 129, 999):
                    assert_values_like_reference(CudaTier(launcher), name, k, dtype)
    for layout, wrong in (
        (index_layout("int32", 2, 9), [3, 3]),
        (index_layout("chunk12", 4, 8192, 2), [1, 2, 3, 4097]),
    ):
        try:
            indices, out = torch.tensor(wrong, dtype=torch.int32), torch.empty(8, dtype=torch.uint8)
            CudaTier(launcher).encode_indices(indices, layout, out)
        except ShimError:
            continue
        raise AssertionError(f"{wrong} were encoded as {layout}")


def selection_battery(launcher: ShimLauncher) -> None:
    """Raises when the selections are wrong: the shortest set of cases that takes every path."""
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

    battery = codec_battery if bug.file in CODEC_FILES else selection_battery
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
    for battery in (selection_battery, codec_battery):
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
