"""`ds_sparse report`: what runs sent, how long that took, and what became of their loss, side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Command, CommandError, JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.logs import Run

UNREADABLE, NO_SCALARS, NO_MATPLOTLIB = 3, 4, 5
EPILOG = f"""\
exit status:
  0  reported
  2  the command line cannot be understood
  {UNREADABLE}  a folder cannot be read
  {NO_SCALARS}  no folder holds scalars of DeepSpeed's TensorBoard or CSV monitors
  {NO_MATPLOTLIB}  --out was given, and matplotlib is not installed

examples:
  ds_sparse report runs/dense runs/mstopk_zero1
  ds_sparse report runs --out report     # report/index.html and its pictures
  ds_sparse report runs --json | jq '.runs[] | {{name, dense_over_wire}}'
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folders", metavar="RUN_DIR", nargs="+", type=Path, help="output_path/job_name of a run, or a folder of runs"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write pictures and a page there; needs matplotlib")


def _run(arguments: Namespace) -> JsonObject:
    from ..report.logs import read_runs
    from ..report.summary import summarize

    for folder in arguments.folders:
        if not folder.is_dir():
            raise CommandError(UNREADABLE, f"{folder} cannot be read: it is not a folder")
    runs = read_runs(arguments.folders)
    if not runs:
        raise CommandError(
            NO_SCALARS,
            f"{', '.join(map(str, arguments.folders))}: no scalars there. What to do: switch 'tensorboard' or "
            f"'csv_monitor' on in ds_config.json, and give its output_path/job_name.",
        )
    summaries = [summarize(run) for run in runs]
    files = [] if arguments.out is None else _write(runs, summaries, arguments.out)
    return {"runs": summaries, "files": [str(path) for path in files]}


def _write(runs: list[Run], summaries: list[JsonObject], folder: Path) -> list[Path]:
    from ..report.page import page
    from ..report.summary import table

    try:
        from ..report.plots import draw
    except ModuleNotFoundError as error:
        raise CommandError(
            NO_MATPLOTLIB, f"--out draws with matplotlib: {error}. What to do: pip install 'ds_sparse[plots]'"
        ) from error
    pictures = draw(runs, folder)
    whole = folder / "index.html"
    whole.write_text(page([run.name for run in runs], table(summaries), pictures), encoding="utf-8")
    return [*pictures, whole]


def _show(result: JsonObject, console: Console) -> None:
    from ..report.summary import table
    from .tables import print_table

    print_table(console, "Runs", ("", *(run["name"] for run in result["runs"])), table(result["runs"]))
    for path in result["files"]:
        console.print(f"written: {path}", soft_wrap=True, markup=False)


COMMAND = Command("tell runs from their logs: bytes, time, density, loss", EPILOG, _add_arguments, _run, _show)
