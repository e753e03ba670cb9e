"""`ds_sparse simulate`: the cost model carried on to clusters that are not at hand."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .cluster import STATUSES, add_cluster_arguments, assumptions, density, job_of, speeds_of
from .command import Command, CommandError, JsonObject

if TYPE_CHECKING:
    from rich.console import Console

UNWRITABLE, NO_MATPLOTLIB = 4, 5
EPILOG = f"""\
{STATUSES}  {UNWRITABLE}  a file cannot be written
  {NO_MATPLOTLIB}  there is no matplotlib, which --plot needs

These are predictions, not measurements: what they assume is printed with them.

examples:
  ds_sparse simulate --model-size 7e9 --nodes 1024 --ranks-per-node 8 --probe probe.json --plot curves.png
  ds_sparse simulate --model-size 7e9 --nodes 1024 --ranks-per-node 8 --gbit-per-second 10 --csv curves.csv
"""


def _add_arguments(parser: ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--density", type=density, default=0.01, help="(%(default)g)")
    parser.add_argument("--value-dtype", choices=("fp32", "bf16", "int8", "int4"), default="fp32", help="(%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the points")


def _run(arguments: Namespace) -> JsonObject:
    from ..planner import simulate
    from ..planner.simulation import write_csv, write_plot

    job, speeds = job_of(arguments), speeds_of(arguments)
    points = simulate(job, speeds, arguments.density, arguments.value_dtype)
    title = (
        f"Predicted: {job.model_size:.3g} parameters, {job.ranks_per_node} ranks a node, "
        f"{speeds.link.gbit_per_second:.3g} Gbit/s a node, density {arguments.density:g}, {arguments.value_dtype}"
    )
    try:
        if arguments.csv:
            write_csv(points, arguments.csv)
        if arguments.plot:
            write_plot(points, arguments.plot, title)
    except OSError as error:
        raise CommandError(UNWRITABLE, f"{error.filename} cannot be written: {error.strerror}") from error
    except ModuleNotFoundError as error:
        raise CommandError(
            NO_MATPLOTLIB, f"--plot needs matplotlib: {error}. What to do: pip install 'ds_sparse[plots]'"
        ) from error
    return {
        "title": title,
        "points": [point._asdict() for point in points],
        "assumptions": assumptions(job, speeds),
        "written": [str(path) for path in (arguments.csv, arguments.plot) if path],
    }


def _show(result: JsonObject, console: Console) -> None:
    from rich.markup import escape

    from .tables import print_table

    curves = list(dict.fromkeys(point["curve"] for point in result["points"]))
    seconds: dict[int, list[str]] = {}
    for point in result["points"]:
        seconds.setdefault(point["nodes"], []).append(f"{point['seconds']:.3g} s, {point['sent_bytes'] / 1e6:.3g} MB")
    rows = [(nodes, *cells) for nodes, cells in seconds.items()]
    print_table(console, f"{result['title']}; for each step and rank", ("nodes", *curves), rows)
    for line in result["assumptions"]:
        console.print(f"assumed: {escape(line)}")
    for path in result["written"]:
        console.print(f"written to {escape(path)}")


COMMAND = Command("predict time and bytes for growing clusters", EPILOG, _add_arguments, _run, _show)
