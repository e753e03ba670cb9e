"""What a command of the command line is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

JsonObject = dict[str, Any]  # as json.dumps takes it


@dataclass(frozen=True)
class Command:
    """What `--json` prints is the whole result; `show` lays the same out for a person."""

    summary: str
    epilog: str  # of --help: exit statuses and examples
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], JsonObject]
    show: Callable[[JsonObject, Console], None]


class CommandError(Exception):
    """Ends a command with a message and an exit status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
