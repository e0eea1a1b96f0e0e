"""Parts that the static tests share: the package's source files, parsed once, and the dotted name of a call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


IN_SANDBOXES = (  # what runs nowhere else, and is ended there at the limits
    "tidemill/sandbox/forwarder.py",
    "tidemill/sandbox/program_start.py",
    "tidemill/envs/code_checks/remote_objects.py",
    "tidemill/envs/code_checks/tested_code.py",
    *(f"tidemill/sandbox/escapes/{name}.py" for name in ("escape_tools", "file_escapes", "kernel_escapes")),
    *(f"tidemill/sandbox/escapes/{name}.py" for name in ("network_escapes", "process_escapes", "resource_escapes")),
)


def sources() -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every module of the package."""
    for path in sorted((ROOT / "tidemill").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a module's tree. The tree is parsed once, so it is not to be changed."""
    return list(ast.walk(ast.parse(path.read_text())))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names, attributes and calls; what cannot be named is `?`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case ast.Call(func=function):
            return dotted(function)
    return "?"
