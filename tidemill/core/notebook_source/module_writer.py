"""A notebook's function written as an importable module, with all that it reads.

    function -> its source and the names that it reads -> imports | plain constants | other functions and classes -> text

A name that stands for anything else (a model, a client, an open file) exists in this process alone. So does what the
function changes: a copy in another process would not see the change.
"""

from __future__ import annotations
import __future__ as features

import ast
import builtins
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from tidemill.core.errors import NotImportable
from tidemill.core.import_object import reference_of
from tidemill.core.notebook_source.source_lookup import (
    Definition,
    cells,
    definition,
    folder_of,
    guarded,
    import_of,
    names_read,
)

NOTICE = "# Taken by tidemill from the program or notebook that began this run, for its worker processes."


def reference_for(function: Callable[..., Any], folder: Path | None, role: str) -> str:
    """FILE.py:NAME or MODULE:NAME under which another process can import `function`.

    A function that cannot be imported as it is, or not without running the program, is written into `folder` as a module.
    Raises NotImportable where that is impossible, or where `folder` is None.
    """
    if not isinstance(function, FunctionType):
        raise NotImportable(f"it is a {type(function).__name__} of this process, not a function")
    if _importable(function) or (folder is None and "<" not in function.__qualname__):
        try:
            return reference_of(function)
        except ValueError as error:
            raise NotImportable(str(error)) from None
    if folder is None:
        raise NotImportable("it is a lambda or is defined inside a function")
    return written(function, folder, role)


def _importable(function: FunctionType) -> bool:
    if "<" in function.__qualname__:
        return False
    if function.__module__ != "__main__":
        return function.__module__ in sys.modules
    texts = cells(function.__globals__)
    return "In" not in function.__globals__ and bool(texts) and guarded(texts[0])


def written(function: FunctionType, folder: Path, role: str) -> str:
    """FILE.py:NAME of `function`, whose source is written into `folder`. Raises NotImportable."""
    name, text = as_module(function)
    file = folder / f"{role}_{name}.py"  # never the name of a module that the function may import
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = file.with_name(f"{file.name}.partial")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    return f"{file.resolve()}:{name}"


def as_module(function: FunctionType) -> tuple[str, str]:
    """(the function's name in the module, the module's text). Raises NotImportable."""
    module = _Module(function)
    return module.name, module.text()


class _Module:
    """The module's text as far as it is collected: imports, constants and definitions."""

    def __init__(self, function: FunctionType) -> None:
        self._namespace, self._home = function.__globals__, function.__module__
        self._cells = cells(self._namespace)
        self._seen = set[str]()
        self._imports, self._folders, self._bodies = dict[str, None](), dict[str, None](), list[str]()
        self._mutable, self._trees = set[str](), list[ast.AST]()
        self._future = False
        self.name = self._define(function, bare=True)
        for tree in self._trees:
            if changed := may_change(tree, self._mutable):
                raise NotImportable(f"it may change {changed}, a {type(self._namespace[changed]).__name__} of this process")

    def text(self) -> str:
        parts = [NOTICE, *(["from __future__ import annotations"] if self._future else [])]
        if self._folders:
            parts += ["import sys", f"sys.path += [each for each in {list(self._folders)!r} if each not in sys.path]"]
        head = "\n".join([*parts, *self._imports])
        text = "\n\n\n".join([head, *(body.rstrip() for body in self._bodies)]) + "\n"
        ast.parse(text)  # raises SyntaxError for what no module could be
        return text

    def _define(self, value: Any, bare: bool = False) -> str:
        """Add a function or class after all that it reads; return its name there. bare: no decorators."""
        found = definition(value, self._cells, bare)
        if found is None:
            raise NotImportable(f"the source of {getattr(value, '__name__', 'it')} is not to be had here")
        self._seen.add(found.name)
        if isinstance(inner := _inner(value), FunctionType):
            self._expect_stateless(inner)
        self._trees.append(found.tree)
        reads, assigned = names_read(found.text)
        if assigned:
            raise NotImportable(f"it sets {min(assigned)}, a variable of this process")
        for name in sorted(reads):
            self._need(name, found)
        self._bodies.append(found.text)
        return found.name

    def _expect_stateless(self, function: FunctionType) -> None:
        self._future = self._future or bool(function.__code__.co_flags & _ANNOTATIONS)
        if function.__closure__:
            raise NotImportable(f"it closes over {', '.join(function.__code__.co_freevars)}")
        if state := sorted(set(vars(function)) - {"__wrapped__"}):
            raise NotImportable(f"it has the attribute {state[0]}")

    def _need(self, name: str, reader: Definition) -> None:
        if name in self._seen or name not in self._namespace:  # a builtin, or an error that every process would meet
            return
        self._seen.add(name)
        value = self._namespace[name]
        if getattr(builtins, name, _NOTHING) is value or self._imported(name, value, reader):
            return
        if self._owns(value):
            if (own := self._define(value)) != name:
                self._bodies.append(f"{name} = {own}")
        elif (text := literal(value)) is not None:
            self._imports |= dict.fromkeys(text.imports)
            self._bodies.append(f"{name} = {text.text}")
            if text.mutable:
                self._mutable.add(name)
        else:
            raise NotImportable(f"it uses {name}, a {type(value).__name__} of this process")

    def _imported(self, name: str, value: Any, reader: Definition) -> bool:
        found = list(_imports(name, value, reader, self._cells, self._home))
        for module, statement in found:
            self._imports[statement] = None
            if (folder := folder_of(module)) is not None:
                self._folders[folder] = None
        return bool(found)

    def _owns(self, value: Any) -> bool:
        inner = _inner(value)
        local = isinstance(inner, type) and "<" in inner.__qualname__  # what it closes over is not to be seen
        return isinstance(inner, FunctionType | type) and inner.__module__ == self._home and not local


def _imports(name: str, value: Any, reader: Definition, texts: list[str], home: str) -> Iterator[tuple[str, str]]:
    """(module, import statement) pairs that are needed for `name` to mean `value`."""
    if isinstance(value, ModuleType):
        if value.__name__ == "__main__" or sys.modules.get(value.__name__) is not value:
            return
        plain = value.__name__ == name
        yield value.__name__, f"import {name}" if plain else f"import {value.__name__} as {name}"
        for chain in reader.chains(name):  # `import xml.etree.ElementTree` binds only `xml`
            inner = value.__name__
            for part in chain:
                inner = f"{inner}.{part}"
                if inner not in sys.modules:
                    break
                yield inner, f"import {inner}"
        return
    module = getattr(value, "__module__", None)
    names = [getattr(value, key, None) for key in ("__name__", "_name")]
    candidates = [(module, each) for each in [*names, name] if isinstance(module, str) and isinstance(each, str)]
    for module, attribute in [*candidates, *import_of(name, texts)]:
        if module != home and module != "__main__" and _reaches(module, attribute, value):
            yield module, f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")
            return


def _inner(value: Any) -> Any:
    """The function that a decorated one wraps."""
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


def _reaches(module: str, attribute: str, value: Any) -> bool:
    return module in sys.modules and getattr(sys.modules[module], attribute, _NOTHING) is value


_NOTHING = object()
_ANNOTATIONS = features.annotations.compiler_flag


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
