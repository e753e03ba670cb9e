"""`make matrix`: features of DeepSpeed x ZeRO stages x precisions, what works and what is refused.

    python -m tests.multirank.matrix           prints the table, and compares it with docs/features.md
    python -m tests.multirank.matrix --write   writes it there
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from tests.multirank.feature_cells import STEPS, Run, train_cells
from tests.multirank.features import COLUMNS, DTYPES, FEATURES, Feature
from tests.ranks import RankError, run_ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "features.md"
HEADER = "| Feature | " + " | ".join(f"ZeRO {c}" if c.isdigit() else c for c in COLUMNS) + " |"
RANKS = 4
PASS, NOT_MEANT = "works", "does not apply"

# How far method `dense` may be from DeepSpeed alone after some steps, as a share of the way gone. Both average the same
# gradients, in another order and, where DeepSpeed reduces in 16 bits, in fp32 across nodes. One step is off by a
# rounding of the gradient (2^-8 in bf16, 2^-11 in fp16) and by a rounding of a 16-bit parameter, which is itself some
# four roundings of the way gone: 2^-4 and 2^-7 hold what accumulates. fp32 has some 2^-23 a sum.
TOLERANCE = {"fp32": 2.0**-18, "bf16": 2.0**-4, "fp16": 2.0**-7}
BALANCE = 1e-6  # fp32 sums of two numbers below 1


class Verdict(NamedTuple):
    """`kind` is "works", "refused", "does not apply" or "FAIL"; `why` the reason of the two that need one."""

    kind: str
    why: str = ""


def judge(feature: Feature, dtype: str, cell: list[dict[str, Run]]) -> Verdict:
    """Of the runs of all ranks."""
    refusals = {name: {rank[name].refusal for rank in cell} for name in ("stock", "dense", "sparse")}
    ours = refusals["dense"] | refusals["sparse"]
    if ours == {""} == refusals["stock"]:
        problems = list(_problems(feature, dtype, cell))
        return Verdict("FAIL", "; ".join(problems)) if problems else Verdict(PASS)
    if "" not in ours and all(why.startswith("ConfigError: ") for why in ours):
        (why, *_) = sorted(ours)
        return Verdict("refused", why.removeprefix("ConfigError: ").split(" What to do: ")[0])
    if "" not in refusals["stock"] and "" not in refusals["dense"]:
        _, _, why = sorted(refusals["stock"])[0].partition(": ")
        return Verdict("refused", f"by DeepSpeed itself: {why}") if why else Verdict("FAIL", str(refusals))
    return Verdict("FAIL", str({name: sorted(whys) for name, whys in refusals.items()}))


def _problems(feature: Feature, dtype: str, cell: list[dict[str, Run]]) -> Iterator[str]:
    # 1. It took part in every step.
    for name in ("dense", "sparse"):
        for rank in cell:
            steps = len(rank[name].losses)
            if rank[name].exchanges + rank[name].skipped != steps or not rank[name].exchanges:
                yield f"{rank[name].exchanges} exchanges and {rank[name].skipped} skips of {steps} ({name})"
    # 2. Nodes hold the same bits.
    for name, ranks in itertools.product(("dense", "sparse"), feature.alike):
        histories = zip(*(cell[rank][name].params for rank in ranks), strict=True)
        if not all(torch.equal(params[0], other) for params in histories for other in params[1:]):
            yield f"ranks {ranks} differ ({name})"
    # 3. The dense method is DeepSpeed.
    for first, *_ in feature.alike:
        yield from _against_stock(cell[first]["stock"], cell[first]["dense"], TOLERANCE[_coarsest(feature, dtype)])
    # 4. A sparse method trains, and loses nothing.
    losses = [sum(rank["sparse"].losses[step] for rank in cell) for step in (0, -1)]
    if not losses[1] < losses[0]:
        yield f"the loss goes from {losses[0]:.4g} to {losses[1]:.4g} (sparse)"
    for pair in feature.peers:
        runs = [cell[rank]["sparse"].balance for rank in pair]
        for (one, out), (other, _) in zip(*runs, strict=True):
            if not ((one + other) / 2 - out).abs().max() < BALANCE:
                yield "what is sent and what is kept do not add up (sparse)"
                return


def _coarsest(feature: Feature, dtype: str) -> str:
    """The least precise type that gradients are reduced in."""
    autocast = {"bfloat16": "bf16", "float16": "fp16"}.get(feature.settings.get("torch_autocast", {}).get("dtype"), "")
    sent = feature.settings.get("communication_data_type", dtype)
    return max((dtype, autocast or dtype, sent), key=TOLERANCE.__getitem__)


def _against_stock(stock: Run, dense: Run, tolerance: float) -> Iterator[str]:
    gone = (stock.params[-1] - stock.params[0]).norm()
    apart = (dense.params[-1] - stock.params[-1]).norm()
    if gone == 0.0 and apart == 0.0 and stock.skipped == dense.skipped == STEPS:
        return  # the loss scale is still on its way down
    if not apart <= tolerance * gone:
        yield f"dense is {apart / gone:.2g} of the way off DeepSpeed"
    if stock.scales != dense.scales:
        yield f"the loss scale is {dense.scales}, in DeepSpeed {stock.scales}"
    if stock.norms[-1] is not None and abs(dense.norms[-1] - stock.norms[-1]) > tolerance * stock.norms[-1]:
        yield f"the gradient norm is {dense.norms[-1]}, in DeepSpeed {stock.norms[-1]}"


def verdicts(cells: list[tuple[int, str, str]]) -> list[Verdict]:
    """Of `(index in FEATURES, column, dtype)`, all tried by one set of ranks."""
    tried = [cell for cell in cells if cell[1] in FEATURES[cell[0]].columns and cell[2] in FEATURES[cell[0]].dtypes]
    try:
        ranks = run_ranks(RANKS, train_cells, tried, timeout=60 + 60 * len(tried))
    except RankError as error:
        return [Verdict("FAIL", str(error)) for _ in cells]
    results = {cell: [rank[i] for rank in ranks] for i, cell in enumerate(tried)}
    return [judge(FEATURES[c[0]], c[2], results[c]) if c in results else Verdict(NOT_MEANT) for c in cells]


# ---- the document ------------------------------------------------------------------------------------------------


def written(kinds: dict[str, str]) -> str:
    """A cell of the table: what happens in each precision."""
    groups = {kind: [dtype for dtype in DTYPES if kinds[dtype] == kind] for kind in dict.fromkeys(kinds.values())}
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{kind} ({', '.join(dtypes)})" for kind, dtypes in groups.items())


def read() -> dict[tuple[str, str, str], str]:
    """(feature, column, dtype) -> what the document says: "works", "does not apply" or "refused: " and the reason."""
    text = DOCUMENT.read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    said = {}
    for line in text.splitlines():
        name, *cells = (part.strip() for part in line.strip("|").split("|"))
        if line.startswith("| ") and line != HEADER:
            for column, cell in zip(COLUMNS, cells, strict=True):
                for part in cell.split("; "):
                    kind, _, dtypes = part.partition(" (")
                    kind = re.sub(r"^refused \[(\d+)\]$", lambda found: "refused: " + reasons[found[1]], kind)
                    for dtype in dtypes.rstrip(")").split(", ") if dtypes else DTYPES:
                        said[name, column, dtype] = kind
    return said


def as_said(verdict: Verdict) -> str:
    return f"{verdict.kind}: {verdict.why}" if verdict.why else verdict.kind


def write(table: dict[tuple[str, str, str], Verdict]) -> None:
    """Replaces the table and the reasons in the document."""
    reasons: dict[str, int] = {}
    lines = [HEADER, "|---" * (len(COLUMNS) + 1) + "|"]
    for feature in FEATURES:
        cells = []
        for column in COLUMNS:
            kinds = {}
            for dtype in DTYPES:
                verdict = table[feature.name, column, dtype]
                number = reasons.setdefault(verdict.why, len(reasons) + 1) if verdict.why else 0
                kinds[dtype] = f"{verdict.kind} [{number}]" if number else verdict.kind
            cells.append(written(kinds))
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {why}" for why, number in reasons.items()), ""]
    before, _, _ = DOCUMENT.read_text(encoding="utf-8").partition(HEADER)
    DOCUMENT.write_text(before + "\n".join(lines), encoding="utf-8")


def main(arguments: list[str]) -> int:
    table: dict[tuple[str, str, str], Verdict] = {}
    for index, feature in enumerate(FEATURES):
        cells = [(index, column, dtype) for column in COLUMNS for dtype in DTYPES]
        for (_, column, dtype), verdict in zip(cells, verdicts(cells), strict=True):
            table[feature.name, column, dtype] = verdict
            why = f" ({verdict.why})" if verdict.why else ""
            print(f"{feature.name:60} {column:8} {dtype:5} {verdict.kind}{why}", flush=True)
    failed = [cell for cell, verdict in table.items() if verdict.kind == "FAIL"]
    print(f"{len(table) - len(failed)} of {len(table)} cells as they should be, {len(failed)} FAIL")
    if "--write" in arguments and not failed:
        write(table)
    said = read()
    differing = [cell for cell, verdict in table.items() if cell not in failed and said.get(cell) != as_said(verdict)]
    for cell in differing:
        print(f"{DOCUMENT.name} says of {cell}: {said.get(cell)}; found: {as_said(table[cell])}")
    return int(bool(failed or differing))


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (one thread a process)

    sys.exit(main(sys.argv[1:]))
