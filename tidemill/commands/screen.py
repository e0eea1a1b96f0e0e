"""Where commands write: one console with the same manners for all of them.

A terminal gets colours and its own width; a pipe gets plain text, wide enough that a line stays a line. A stream that
cannot encode a character gets a question mark for it.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 120


def console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr, highlight=False, markup=False, width=None if stream.isatty() else PIPE_WIDTH)


def print_json(value: Any) -> None:
    """One line of JSON on standard output. NaN, which JSON does not know, must be None by now."""
    print(json.dumps(value, allow_nan=False))


def labelled(rows: Iterable[tuple[str | Text, RenderableType]]) -> RenderableType:
    """Rows of (what it is, what it says), indented; what is said wraps within its own column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in rows:
        grid.add_row(Text(label, "dim") if isinstance(label, str) else label, content)
    return Padding(grid, (0, 0, 0, 2))


def visible(text: str) -> str:
    """Text without anything that would move the cursor: control characters as their pictures, a line break as an arrow."""
    return "".join("↵" if c == "\n" else "⇥" if c == "\t" else _picture(c) for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "�" if 0x80 <= code < 0xA0 else character
