"""`ds_sparse check`: says before a job is started whether its configuration can be run, and what it will run."""

from __future__ import annotations

import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Command, CommandError, JsonObject
from .versions import versions

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import CommunicationConfig

UNREADABLE, NOT_JSON, NO_SECTION, DISABLED = 3, 4, 5, 6
EPILOG = f"""\
exit status:
  0  it can be run
  1  it cannot: a setting is wrong, or does not go with the others
  2  the command line cannot be understood
  {UNREADABLE}  the file cannot be read
  {NOT_JSON}  the file does not hold a JSON object
  {NO_SECTION}  the file has no section 'compressed_communication'
  {DISABLED}  the section is switched off by "enabled": false

What depends on the model, on the launcher, or on an optimizer that the script makes is checked when training starts.

examples:
  ds_sparse check ds_config.json
  ds_sparse check ds_config.json --json | jq .kernels.cpu.tier
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="path of ds_config.json")


def _run(arguments: Namespace) -> JsonObject:
    from ..config import SECTION, parse

    whole = read(arguments.config)
    if SECTION not in whole:
        raise CommandError(
            NO_SECTION,
            f"{arguments.config} has no section '{SECTION}': DeepSpeed runs as without ds_sparse. What to do: add the "
            f"section, see docs/configuration.md.",
        )
    config = parse(whole[SECTION])
    if not config.enabled:
        raise CommandError(
            DISABLED,
            f"'{SECTION}.enabled' is false in {arguments.config}: DeepSpeed runs as without ds_sparse. What to do: "
            f"set it to true, or leave it out.",
        )
    with _only_warnings():
        from ..adapter.preview import preview
        from ..ops import backend_info

        found = preview(whole, config)
        kernels = backend_info()
    return {
        "config": str(arguments.config),
        "method": {"name": config.method, "description": describe(config)},
        "settings": _settings(config.model_dump(mode="json"), whole[SECTION]),
        "deepspeed": {"zero_stage": found.zero_stage, "optimizer": found.optimizer, "precision": found.precision},
        "kernels": kernels,
        "versions": versions(),
        "notes": found.notes,
    }


def read(path: Path) -> dict[str, Any]:
    """A `ds_config.json` as DeepSpeed reads it: comments and the other liberties of Hjson are allowed.

    Raises:
        CommandError: it cannot be read, or is not an object.
    """
    import hjson

    try:
        text = path.read_text(encoding="utf-8")
        whole = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise CommandError(UNREADABLE, f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(NOT_JSON, f"{path} is not valid JSON: {error}") from error
    if not isinstance(whole, dict):
        raise CommandError(NOT_JSON, f"{path} is not a JSON object, as ds_config.json must be: it starts {text[:20]!r}")
    return whole


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' stands twice in one object")
    return found


@contextmanager
def _only_warnings() -> Iterator[None]:
    """DeepSpeed logs to the standard output, which is for the result; here its warnings alone, to the other one."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


def describe(config: CommunicationConfig) -> str:
    """What will cross nodes, in one sentence."""
    return DESCRIPTIONS[config.method](config)


def _describe_dense(config: CommunicationConfig) -> str:
    return "Every step sends the whole gradient across nodes: the control to compare with."


def _describe_sparse_gradient(config: CommunicationConfig) -> str:
    dense_steps = config.schedule.dense_steps
    first = f"After {dense_steps} dense steps, every step" if dense_steps else "Every step"
    return f"{first} sends {_share(config)} of the gradient across nodes{_choice(config)}."


def _describe_sparse_momentum(config: CommunicationConfig) -> str:
    freeze_step = config.sparse_momentum.freeze_step
    until = f"step {freeze_step}" if freeze_step else "the variance is stable"
    return (
        f"Every step sends the whole gradient across nodes until {until}; then the variance is frozen, and every step "
        f"sends {_share(config)} of Adam's first moment{_choice(config)}."
    )


DESCRIPTIONS: dict[str, Callable[[CommunicationConfig], str]] = {
    "dense": _describe_dense,
    "sparse_gradient": _describe_sparse_gradient,
    "sparse_momentum": _describe_sparse_momentum,
}


def _share(config: CommunicationConfig) -> str:
    return f"{100 * config.compressor.final_density:.4g} %"


def _choice(config: CommunicationConfig) -> str:
    """How that share is chosen, and what becomes of the rest."""
    if config.compressor.type == "identity":
        return ""
    densities = config.schedule.densities
    falling = f", down from {100 * densities[0]:.4g} %" if densities else ""
    rest = "keeps the rest, to add it at the next step" if config.error_feedback.enabled else "drops the rest"
    return f" ({config.compressor.type}{falling}) and {rest}"


def _settings(values: JsonObject, written: JsonObject, path: str = "") -> JsonObject:
    """Every key with its value, and whether it is `written` in the file."""
    found: JsonObject = {}
    for key, value in values.items():
        is_set = key in written
        if isinstance(value, dict):
            found |= _settings(value, written[key] if is_set else {}, f"{path}{key}.")
        else:
            found[path + key] = {"value": value, "set": is_set}
    return found


def _show(result: JsonObject, console: Console) -> None:
    from rich.markup import escape

    from .tables import print_table

    console.print(f"[bold green]{escape(result['config'])} can be run.[/]\n")
    console.print(f"[bold]{result['method']['name']}:[/] {result['method']['description']}\n")
    settings = [
        (key, _as_written(entry["value"]), "set" if entry["set"] else "default")
        for key, entry in result["settings"].items()
    ]
    print_table(console, "Settings of compressed_communication", ("key", "value", "from"), settings)
    known = result["deepspeed"]
    engine = [
        ("ZeRO stage", known["zero_stage"]),
        ("optimizer", known["optimizer"] or "made by the script: checked when training starts"),
        ("precision", known["precision"]),
    ]
    print_table(console, "DeepSpeed", ("what", "as configured"), engine)
    kernels = [(device, entry["tier"], entry["reason"]) for device, entry in result["kernels"].items()]
    print_table(console, "Kernels", ("device", "in use", "why"), kernels)
    packages = [(name, one["version"] or "not installed", one["note"]) for name, one in result["versions"].items()]
    print_table(console, "Versions", ("package", "version", ""), packages)
    for note in result["notes"]:
        console.print(f"[bold yellow]note:[/] {escape(note)}")


def _as_written(value: Any) -> str:
    return "left out" if value is None else json.dumps(value)


COMMAND = Command(
    "check a ds_config.json without starting anything, and say what it will run", EPILOG, _add_arguments, _run, _show
)
