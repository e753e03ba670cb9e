"""`ds_sparse plan`: predicts what each way to communicate takes on a cluster, and says which to choose."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .cluster import STATUSES, add_cluster_arguments, assumptions, density, job_of, positive, speeds_of
from .command import Command, CommandError, JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner import Job, Row

UNWRITABLE = 4
DENSITIES = (0.001, 0.01, 0.05)
EPILOG = f"""\
{STATUSES}  {UNWRITABLE}  the section cannot be written

The best is the fastest at --density; sending less is always faster, and what the model needs is in docs/fidelity.md.

examples:
  ds_sparse plan --model-size 7e9 --nodes 4 --ranks-per-node 8 --probe probe.json --compute-seconds 1.2
  ds_sparse plan --model-size 7e9 --nodes 4 --ranks-per-node 8 --gbit-per-second 10 --write section.json
"""


def _add_arguments(parser: ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--compute-seconds", type=positive, metavar="S", help="of forward and backward in a step")
    parser.add_argument(
        "--method", choices=("sparse_momentum", "sparse_gradient"), default="sparse_momentum",
        help="the one to choose: for Adam, or for SGD with momentum (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--density", type=density, default=0.01, help="the one to choose (%(default)g)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the section for ds_config.json")


def _run(arguments: Namespace) -> JsonObject:
    from ..planner import METHODS, best_row, dense_row, predict, ready_section

    job, speeds = job_of(arguments), speeds_of(arguments)
    rows = predict(job, speeds, METHODS, sorted({*DENSITIES, arguments.density}))
    candidates = [row for row in rows if row.density == 1.0 or row.method == arguments.method]
    best, dense = best_row(candidates, arguments.density), dense_row(rows)
    section = ready_section(best, speeds)
    if arguments.write:
        try:
            arguments.write.write_text(json.dumps(section, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(UNWRITABLE, f"{arguments.write} cannot be written: {error.strerror}") from error
    compute = arguments.compute_seconds or 0.0
    return {
        "verdict": _verdict(best, dense, compute),
        "memory": _memory(job, best, rows[0]),
        "rows": [_as_json(row, arguments.compute_seconds) | {"best": row == best} for row in rows],
        "section": section,
        "written": str(arguments.write) if arguments.write else None,
        "assumptions": assumptions(job, speeds) + ([] if speeds.adam else ["the optimizer's step takes no time"]),
    }


def _as_json(row: Row, compute: float | None) -> JsonObject:
    fields = row._asdict()
    return {
        "method": row.method,
        "exchange": row.exchange,
        "density": row.density,
        "value_dtype": row.value_dtype,
        "communication_seconds": row.seconds,
        "step_seconds": None if compute is None else compute + row.total,
        **{name: fields[name] for name in ("update_seconds", "sent_bytes", "state_bytes")},
    }


def _verdict(best: Row, dense: Row, compute: float) -> str:
    if best == dense:
        return f"Leave compression off: dense is faster here ({dense.method}, {_time(dense.total)} a step)."
    gain = f"{dense.total / best.total:.1f} times as fast as {dense.method}"
    if compute:
        gain += f", which makes the whole step {(compute + dense.total) / (compute + best.total):.2f} times as fast"
    return (
        f"{best.method} with {best.exchange} in {best.value_dtype} at density {best.density:g} communicates in "
        f"{_time(best.total)} a step, {gain}."
    )


def _memory(job: Job, best: Row, alone: Row) -> str:
    return (
        f"The optimizer's state is sharded over the {job.ranks_per_node} ranks of a node, not over all {job.ranks}: "
        f"with its residuals it takes {_bytes(best.state_bytes)} a rank; DeepSpeed's ZeRO-1 alone takes "
        f"{_bytes(alone.state_bytes)}."
    )


def _show(result: JsonObject, console: Console) -> None:
    from rich.markup import escape

    from .tables import print_table

    console.print(f"[bold]{escape(result['verdict'])}[/]")
    console.print(f"{escape(result['memory'])}\n")
    rows = [
        (
            "*" if row["best"] else "", row["method"], row["exchange"], f"{row['density']:g}", row["value_dtype"],
            _time(row["communication_seconds"]),
            "" if row["step_seconds"] is None else _time(row["step_seconds"]),
            _bytes(row["sent_bytes"]), _bytes(row["state_bytes"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    columns = ("", "method", "exchange", "density", "values", "communication", "step", "sent", "state")
    print_table(console, "For each step and rank; * the best", columns, rows)
    for line in result["assumptions"]:
        console.print(f"assumed: {escape(line)}")
    if result["written"]:
        console.print(f"\nsection written to {escape(result['written'])}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


COMMAND = Command(
    "predict what each way to communicate takes on a cluster, and which is best", EPILOG, _add_arguments, _run, _show
)
