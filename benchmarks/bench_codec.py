"""What it costs to turn a payload into bytes and back, against the selection that made it.

    python -m benchmarks.bench_codec                                    # 25M elements, density 0.1, 1 and 5 %
    python -m benchmarks.bench_codec --densities 0.01 --clock cpu --json out.json

All rows of a case, the selection among them, are timed in turn, round by round, so that other load on the machine hits
them alike. The elements are Gaussian. "bits" are those on the wire for one entry; "entropy" is what a random subset of
that density needs, log2(1 / density) + 1.44 bits an entry. chunk12 encodes the selection of `chunked_topk_`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .bench_select import CLOCKS, Clock, ops, timing_parser, write_figures

ENCODINGS = ("int32", "elias_fano", "bitmap", "chunk12")
DTYPES = ("fp32", "bf16", "fp16", "int8", "int4", "int2")
SELECTION = "selection"


class Row(NamedTuple):
    """One timed call: ``prepare`` is not timed."""

    prepare: Callable[[], object]
    work: Callable[[], object]


def nothing() -> None:
    """No preparation."""


def index_rows(indices: Tensor, n: int, encoding: str, k_c: int) -> dict[str, Row]:
    encoded = ops.encode_indices(indices, n, encoding, k_c=k_c)
    k = indices.numel()
    return {
        f"encode {encoding}": Row(nothing, lambda: ops.encode_indices(indices, n, encoding, k_c=k_c, out=encoded)),
        f"decode {encoding}": Row(nothing, lambda: ops.decode_indices(encoded, k, n, encoding, k_c=k_c)),
    }


def value_rows(values: Tensor, dtype: str) -> dict[str, Row]:
    own = values.clone()  # encoding leaves the loss in it: the values are put back before each call
    encoded = ops.encode_values_(values.clone(), dtype)
    k = values.numel()
    return {
        f"encode {dtype}": Row(lambda: own.copy_(values), lambda: ops.encode_values_(own, dtype, out=encoded)),
        f"decode {dtype}": Row(nothing, lambda: ops.decode_values(encoded, k, dtype)),
    }


def measure(n: int, density: float, rounds: int, clock: Clock) -> dict[str, object]:
    """Bits an entry and median milliseconds of each row."""
    generator = torch.Generator().manual_seed(n)
    start, grad = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    residual, k, k_c = start.clone(), max(1, round(density * n)), max(1, round(density * ops.CHUNK))
    values, indices, *_ = ops.ef_topk_(residual, grad, k)
    chunked = ops.chunked_topk_(start.clone(), grad, k_c).indices
    rows = {SELECTION: Row(lambda: residual.copy_(start), lambda: ops.ef_topk_(residual, grad, k))}
    bits = {}
    for encoding in ENCODINGS:
        of = chunked if encoding == "chunk12" else indices
        rows |= index_rows(of, n, encoding, k_c)
        bits[encoding] = 8 * ops.index_bytes(encoding, of.numel(), n, k_c) / of.numel()
    for dtype in DTYPES:
        rows |= value_rows(values, dtype)
        bits[dtype] = 8 * ops.value_bytes(dtype, k) / k
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            row.prepare()
            begin = clock()
            row.work()
            times[name].append(clock() - begin)
    medians = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    entropy = math.log2(1 / density) + 1.44
    return {"elements": n, "density": density, "entropy_bits": entropy, "bits_an_entry": bits, "median_ms": medians}


def table(case: dict) -> str:
    selection = case["median_ms"][SELECTION]
    lines = [f"\n{case['elements'] / 1e6:g}M elements, density {100 * case['density']:g} %  (selection "
             f"{selection:.2f} ms, entropy {case['entropy_bits']:.2f} bits)"]  # fmt: skip
    lines.append(f"{'':12}{'bits':>8}{'encode ms':>11}{'decode ms':>11}{'both, % of the selection':>26}")
    for name, bits in case["bits_an_entry"].items():
        encode, decode = (case["median_ms"][f"{way} {name}"] for way in ("encode", "decode"))
        lines.append(f"{name:12}{bits:8.2f}{encode:11.3f}{decode:11.3f}{100 * (encode + decode) / selection:26.1f}")
    return "\n".join(lines)


def main() -> None:
    args = timing_parser(__doc__ or "", "for the selection; the codecs run on one").parse_args()
    torch.set_num_threads(args.threads)
    tier = ops.backend_info()["cpu"]["tier"]
    print(f"cpu tier: {tier}, {args.threads} thread(s), {args.clock} time")
    cases = []
    for n in map(int, args.elements):
        for density in args.densities:
            cases.append(measure(n, density, args.rounds, CLOCKS[args.clock]))
            print(table(cases[-1]), flush=True)
    write_figures(args, cases)


if __name__ == "__main__":
    main()
