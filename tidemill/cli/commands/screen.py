"""The console of all commands, and helpers that print rows and paragraphs to it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.observability.console import LABEL
from tidemill.observability.safe_text import DEGRADE, paragraphs, visible

PIPE_WIDTH = 120
INDENT = 2
WHOLE = "next"  # label of commands, which users copy
_AS_IS: dict[str, Any] = {"overflow": "ignore", "no_wrap": True, "crop": False}
Row = tuple[str | Text, str | Text]  # label, text
MIN_COLUMN = 20  # narrowest column on a terminal that is too narrow


def console(stderr: bool = False) -> Console:
    """A console on standard output or error."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=DEGRADE)
    return Console(stderr=stderr, highlight=False, markup=False, width=None if stream.isatty() else PIPE_WIDTH)


def own_name() -> str:
    """The name of this program: `tidemill` if the shell finds it, else its path."""
    called, found = Path(sys.argv[0]), shutil.which("tidemill")
    if called.name != "tidemill" or not called.is_file() or (found and os.path.samefile(found, called)):
        return "tidemill"
    return min(os.path.relpath(called), os.path.abspath(called), key=len)


def print_json(value: Any) -> None:
    """Print one line of JSON. Raises ValueError for NaN, which JSON does not know."""
    print(json.dumps(value, allow_nan=False))


def print_rows(screen: Console, rows: Sequence[Row]) -> None:
    """Print rows of (label, text), indented. The text wraps within its own column."""
    labels = [Text(label, "dim") if isinstance(label, str) else label for label, _ in rows]
    edge = INDENT + max((label.cell_len for label in labels), default=0) + INDENT
    for label, (_, said) in zip(labels, rows, strict=True):
        content = Text(said) if isinstance(said, str) else said
        lines = content.wrap(screen, max(MIN_COLUMN, screen.width - edge), overflow="fold") or [Text()]
        for number, line in enumerate(lines):
            line.rstrip()
            begin = Text.assemble(" " * INDENT, label if number == 0 else "")
            begin.pad_right(edge - begin.cell_len)
            screen.print(begin + line if line else begin[: len(begin.plain.rstrip())], soft_wrap=True)


def show_rows(title: str | Text, rows: Sequence[Row]) -> Console:
    """Print a title and rows below it. Returns the console."""
    screen = console()
    screen.print(Text(title, "bold") if isinstance(title, str) else title)
    print_rows(screen, rows)
    return screen


def print_labelled(screen: Console, rows: Sequence[tuple[str, str]], style: str = "") -> None:
    """Print rows of (label, sentence) with each label once. Words, paths and commands stay whole."""
    before = ""
    for label, said in rows:
        shown, before = "" if label == before else label, label
        width = screen.width - LABEL - INDENT
        first, *rest = [visible(said)] if label == WHOLE else paragraphs(said, width, "", "")
        screen.print(Text.assemble(" " * INDENT, (f"{shown:<{LABEL}}", style or "dim"), (first, style)), **_AS_IS)
        for line in rest:
            screen.print(Text(" " * (INDENT + LABEL) + line, style), **_AS_IS)


def print_wrapped(screen: Console, said: str, style: str = "") -> None:
    """Print a paragraph whose words stay whole."""
    for line in paragraphs(said, screen.width):
        screen.print(Text(line, style), **_AS_IS)
