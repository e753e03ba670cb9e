"""One HTML page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """\
body { font: 15px sans-serif; margin: 2em auto; max-width: 70em; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ccc; padding: .3em .8em; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: pre; }
img { display: block; margin: 2em 0; max-width: 100%; }"""


def page(names: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[Path]) -> str:
    """The table, runs side by side, and the pictures (PNG files) under it."""
    lines = ["<!doctype html>", '<html lang="en">', '<head><meta charset="utf-8"><title>ds_sparse report</title>']
    lines += [f"<style>\n{STYLE}\n</style></head>", "<body>", "<h1>ds_sparse report</h1>", "<table>"]
    lines += [_row("th", ["run", *names]), *(_row("td", row) for row in rows), "</table>"]
    for path in pictures:
        content = base64.b64encode(path.read_bytes()).decode()
        lines.append(f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{content}">')
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"


def _row(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"
