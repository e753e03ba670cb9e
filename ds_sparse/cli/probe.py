"""`ds_sparse probe`: measures the links and devices of the cluster that a job runs on."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .cluster import count
from .command import Command, CommandError, JsonObject

if TYPE_CHECKING:
    from rich.console import Console

NO_JOB, UNWRITABLE = 3, 4
EPILOG = f"""\
exit status:
  0  measured
  1  the nodes are not alike
  2  the command line cannot be understood
  {NO_JOB}  not started as a job, on every rank
  {UNWRITABLE}  the file cannot be written

All ranks measure at the same time, as they would train. A bar on the standard error shows how far they are.

examples:
  deepspeed --hostfile hosts --module ds_sparse probe --out probe.json
  torchrun --nproc-per-node 8 --nnodes 2 ... -m ds_sparse probe --out probe.json
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="written by rank 0: probe.json")
    parser.add_argument(
        "--ranks-per-node", type=count, help="cut the ranks into nodes of so many, whatever hosts they are on"
    )


def _run(arguments: Namespace) -> JsonObject:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CommandError(
            NO_JOB,
            f"the probe was not started as a job: {', '.join(missing)} not in the environment. What to do: start it by "
            f"a launcher, as in: deepspeed --module ds_sparse probe --out {arguments.out}",
        )
    if os.environ["RANK"] != "0":
        from ..planner import run_probe

        run_probe(arguments.ranks_per_node)
        return {}
    found = _with_bar(arguments.ranks_per_node)
    try:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(UNWRITABLE, f"{arguments.out} cannot be written: {error.strerror}") from error
    return {"file": str(arguments.out), **found}


def _with_bar(ranks_per_node: int | None) -> JsonObject:
    from rich.console import Console
    from rich.progress import Progress

    from ..planner import run_probe
    from ..planner.probe import STEPS

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=STEPS + 1)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        return run_probe(ranks_per_node, advance)


def _show(result: JsonObject, console: Console) -> None:
    from .tables import print_table

    console.print(f"{result['nodes']} nodes of {result['ranks_per_node']} ranks, {result['device']}\n")
    links = [
        (name, f"{found['gbit_per_second']:.3g}", f"{found['latency_us']:.3g}", what)
        for name, found, what in (
            ("between nodes", result["inter_node"], "of a node, shared by its ranks"),
            ("inside a node", result["intra_node"], "of a rank"),
        )
        if found
    ]
    print_table(console, "Links", ("link", "Gbit/s", "latency, us", ""), links)
    work = [(key.replace("_ns_per_", ", ns per "), f"{result[key]:.3g}") for key in result if "_ns_per_" in key]
    print_table(console, f"Work, kernels: {result['kernels']}", ("work", "time"), work)
    console.print(f"written to {result['file']}")


COMMAND = Command(
    "measure links and devices, started as a job on the cluster to be planned for", EPILOG, _add_arguments, _run, _show
)
