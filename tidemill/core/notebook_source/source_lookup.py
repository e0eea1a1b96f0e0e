"""Lookup of source text: definitions, notebook cells, and the names that code reads."""

from __future__ import annotations

import ast
import inspect
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition: the name that it binds, its text, and that text parsed."""

    name: str
    text: str
    tree: ast.AST

    def chains(self, name: str) -> list[tuple[str, ...]]:
        """The attribute chains behind `name`: (b, c) for every `a.b.c` where `name` is a."""
        return [chain[1:] for node in ast.walk(self.tree) if (chain := _chain(node))[:1] == (name,) and len(chain) > 1]


def cells(namespace: Mapping[str, Any]) -> list[str]:
    """The source texts of a program: a notebook's cells, the latest first, or its file."""
    executed = namespace.get("In")
    if isinstance(executed, list):
        return [each for each in reversed(executed) if isinstance(each, str)]
    path = Path(str(namespace.get("__file__", "")))
    try:
        return [path.read_text(encoding="utf-8")] if path.is_file() else []
    except (OSError, UnicodeDecodeError):
        return []


def definition(value: Any, texts: list[str], bare: bool = False) -> Definition | None:
    """The definition of a function or class, or None. bare: without its decorators."""
    text, name = _source(value), getattr(value, "__name__", "")
    found = _defined(text, name, bare) if text else None
    if found is None and isinstance(value, type):  # Python finds no class of a notebook before 3.13
        found = next(filter(None, (_defined(each, value.__name__, bare) for each in texts)), None)
    return found


def _source(value: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(value if isinstance(value, type) else inspect.unwrap(value)))
    except (OSError, TypeError):
        return ""


def _defined(text: str, name: str, bare: bool) -> Definition | None:
    """The last definition of `name` at the top level of `text`; for a lambda, its assignment."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in reversed(tree.body):
        match node:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own) if own == name:
                first = node.lineno if bare else min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lines = text.split("\n")[first - 1 : node.end_lineno]
                return _parsed(own, "\n".join(lines))
            case ast.Assign(targets=[ast.Name(id=own)], value=ast.Lambda()) if name == "<lambda>":
                return _parsed(own, "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno]))
    return None


def _parsed(name: str, text: str) -> Definition:
    return Definition(name, text, ast.parse(text))


def names_read(text: str) -> tuple[set[str], set[str]]:
    """(names of the module that a definition reads, names that it sets by `global`)."""
    top = symtable.symtable(text, "source", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    reads = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()} - own
    inner = [symbol for table in _below(top) for symbol in table.get_symbols() if symbol.is_global()]
    sets = {symbol.get_name() for symbol in inner if symbol.is_assigned()}
    return reads | {symbol.get_name() for symbol in inner if symbol.is_referenced()} - own, sets


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _below(child)


def import_of(name: str, texts: list[str]) -> list[tuple[str, str]]:
    """(module, attribute) of the `from` imports at the top of the texts that bind `name`."""
    found = []
    for text in texts:
        try:
            body = ast.parse(text).body
        except SyntaxError:
            continue
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found += [(node.module, each.name) for each in node.names if (each.asname or each.name) == name]
    return found


def folder_of(module: str) -> str | None:
    """The folder to put on `sys.path` for the module; None if it is on every search path here."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    installed = (*_INSTALLED, *site.getsitepackages(), site.getusersitepackages())
    return None if any(folder.is_relative_to(Path(each).resolve()) for each in installed) else str(folder)


def guarded(text: str) -> bool:
    """True if the program has an `if __name__ == "__main__":` block, so that importing it is safe."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(isinstance(node, ast.If) and "__name__" in {each for each, _ in _names(node.test)} for node in body)


def _names(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    return ((each.id, each) for each in ast.walk(node) if isinstance(each, ast.Name))


def _chain(node: ast.AST) -> tuple[str, ...]:
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()
