"""Python source text for plain values, to copy a notebook's variables elsewhere."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

LONGEST = 4 << 20  # characters
_SCALARS = (int, str, bytes, bool, complex, type(None), type(...))
_READING = {"get", "items", "keys", "values", "index", "count", "copy", "isdisjoint", "issubset", "union", "intersection"}
_CALLS = {"len", "sorted", "set", "frozenset", "list", "tuple", "dict", "sum", "min", "max", "any", "all", "enumerate"}
_CALLS |= {"zip", "reversed", "str", "repr", "bool"}


@dataclass(frozen=True, slots=True)
class Literal:
    text: str
    imports: tuple[str, ...] = ()
    mutable: bool = False


def literal(value: Any) -> Literal | None:
    """An expression that evaluates to an equal value; None if there is none or it is very long."""
    kind = type(value)
    if kind is float:
        return Literal(repr(value) if math.isfinite(value) else f"float({str(value)!r})")
    if kind in _SCALARS:
        return _bounded(Literal(repr(value)))
    if kind is re.Pattern:
        return Literal(f"re.compile({value.pattern!r}, {int(value.flags & ~re.DEBUG)})", ("import re",))
    if isinstance(value, PurePath):
        return Literal(f"{kind.__name__}({str(value)!r})", (f"from pathlib import {kind.__name__}",))
    if kind in (list, tuple, set, frozenset):
        return _of_items(value)
    if kind is dict:
        keys, values = literal(list(value)), literal(list(value.values()))
        if keys is None or values is None:
            return None
        return _bounded(Literal(f"dict(zip({keys.text}, {values.text}))", keys.imports + values.imports, True))
    return None


def _of_items(value: Any) -> Literal | None:
    inner = [literal(each) for each in value]
    if any(each is None for each in inner):
        return None
    known = [each for each in inner if each is not None]
    text = f"[{', '.join(each.text for each in known)}]"
    if not isinstance(value, list):
        text = f"{type(value).__name__}({text})"
    imports = tuple(statement for each in known for statement in each.imports)
    mutable = isinstance(value, list | set) or any(each.mutable for each in known)
    return _bounded(Literal(text, imports, mutable))


def _bounded(found: Literal) -> Literal | None:
    return found if len(found.text) <= LONGEST else None


def may_change(tree: ast.AST, names: set[str]) -> str:
    """The first of `names` that the code may change; "" if it only reads them."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and not _only_read(node, above):
            return node.id
    return ""


def _only_read(node: ast.Name, above: dict[ast.AST, ast.AST]) -> bool:
    match above.get(node):
        case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
            return not isinstance(above.get(above[node]), ast.Attribute | ast.AugAssign)  # table[key].append(...)
        case ast.Attribute(attr=method):
            return method in _READING
        case ast.Call(func=ast.Name(id=function)) if function in _CALLS:
            return True
        case ast.Compare() | ast.For() | ast.comprehension() | ast.FormattedValue():
            return True
    return False
