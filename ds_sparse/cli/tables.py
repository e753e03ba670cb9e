"""Tables for people, in one form for all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Cells are taken as they are, brackets too, and broken into lines where the terminal is too narrow."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
