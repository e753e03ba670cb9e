"""The command line: `ds_sparse COMMAND`, also as `python -m ds_sparse COMMAND`.

A command is one file with a `Command` and one row in COMMANDS. Importing them is quick: what takes long to import
(torch, DeepSpeed) is imported by the command that runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import ConfigError
from . import check, plan, probe, report, simulate
from .command import CommandError, JsonObject

COMMANDS = {
    "check": check.COMMAND,
    "probe": probe.COMMAND,
    "plan": plan.COMMAND,
    "simulate": simulate.COMMAND,
    "report": report.COMMAND,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status. 1: the configuration cannot be run (ConfigError); others: see its --help.

    Raises:
        SystemExit: of argparse, with status 2 where the line cannot be understood.
    """
    given = _parser().parse_args(arguments)
    command = COMMANDS[given.command]
    try:
        result = command.run(given)
    except (ConfigError, CommandError) as error:
        status = error.status if isinstance(error, CommandError) else 1
        if given.json:
            _print_json({"ok": False, "status": status, "error": str(error)})
        else:
            print(error, file=sys.stderr)
        return status
    if not result:  # another rank of the job speaks for this one
        return 0
    if given.json:
        _print_json({"ok": True, "status": 0, **result})
    else:
        from rich.console import Console

        command.show(result, Console(highlight=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ds_sparse", description="Compressed inter-node communication for DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"ds_sparse {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher puts it in front
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name, help=command.summary, description=command.summary, epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _print_json(result: JsonObject) -> None:
    print(json.dumps(result, indent=2))
