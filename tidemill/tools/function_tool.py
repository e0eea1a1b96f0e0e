"""Tools from functions: `@tool`, plain functions, methods of an object, and objects with a schema of their own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, get_args, overload

from tidemill.core.errors import ConfigError
from tidemill.tools.function_schema import function_schema, type_hints

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__tidemill_tool__"  # attribute of a function that `@tool` has marked
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as the engines' servers accept it


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """One tool: its name, its schema, and the function behind it."""

    name: str
    schema: dict[str, Any]  # as chat completions take it: {"type": "function", "function": {...}}
    function: Callable[..., Any]
    limit_s: float | None = None  # seconds of one call; None: those of its ToolSet
    owner: object = None  # the object whose method it is: calls to one object never overlap
    closed: bool = True  # arguments that the schema does not name are refused
    enums: Mapping[str, type[Enum]] = field(default_factory=dict)  # arguments that are given as members

    @property
    def awaits(self) -> bool:
        """True if the function is a coroutine function."""
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    def values_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function is called with them: texts of an Enum as its members."""
        return {k: self.enums[k](v) if k in self.enums and v is not None else v for k, v in arguments.items()}


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None, limit_s: float | None = None) -> Callable[[F], F]: ...
def tool(function: F | None = None, *, name: str | None = None, limit_s: float | None = None) -> F | Callable[[F], F]:
    """Decorator that checks a function as a tool and gives it a name or a time limit; it stays a plain function.

    The function, sync or async, needs a docstring in Google's style and type hints that JSON has values for. name: what the
    model calls it, the function's by default. limit_s: seconds of one call. Raises ConfigError for what is missing.
    """

    def marked(decorated: F) -> F:
        if limit_s is not None and not limit_s > 0:
            raise ConfigError(f"tool(limit_s={limit_s!r}): expected seconds, more than 0")
        decorated.__dict__[_MARK] = {"name": name, "limit_s": limit_s}
        as_tool(decorated)
        return decorated

    return marked if function is None else marked(function)


def as_tool(given: Any) -> Tool:
    """The tool that a function, a method, or an object with `schema` is. Raises ConfigError, in one sentence, for others."""
    if isinstance(given, Tool):
        return given
    if not callable(given) or isinstance(given, type):
        raise ConfigError(f"tool {given!r:.80} is a {type(given).__name__}: expected a function or a callable object")
    marks = getattr(given, _MARK, {})
    own = getattr(given, "schema", None)
    name = marks.get("name") or getattr(given, "__name__", "") or type(given).__name__
    if isinstance(own, Mapping):
        schema, name = _own_schema(own, name)
        enums: dict[str, type[Enum]] = {}
    else:
        routine = given if inspect.isroutine(given) else given.__call__
        schema, enums = function_schema(routine, name), _enums(type_hints(routine, name))
    if not _NAME.fullmatch(name):
        raise ConfigError(f"tool {name!r:.80}: expected a name of at most 64 letters, digits, _, - and .")
    owner = getattr(given, "__self__", None) if inspect.isroutine(given) else given
    owner = None if inspect.ismodule(owner) or isinstance(owner, type) else owner
    return Tool(name, schema, given, marks.get("limit_s"), owner, enums=enums)


def tools_of(instance: object, leave_out: Sequence[str] = ()) -> list[Tool]:
    """The public methods of an object as tools, except those in `leave_out`, in the order of their names as in TRL."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction) if not name.startswith("_")]
    return [as_tool(getattr(instance, name)) for name in names if name not in leave_out]


def _own_schema(given: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """A schema that an object brings, whole or only its inner part, and the tool's name."""
    inner = given.get("function") if given.get("type") == "function" else given
    if not isinstance(inner, Mapping) or not isinstance(inner.get("parameters", {}), Mapping):
        raise ConfigError(f"tool {name!r}: its schema is {given!r:.80}: expected name, description and parameters")
    told = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}} | dict(inner)
    return {"type": "function", "function": told}, str(told["name"])


def _enums(hints: Mapping[str, Any]) -> dict[str, type[Enum]]:
    """Arguments whose hint is an Enum, or an Enum or None."""
    found = dict[str, type[Enum]]()
    for name, hint in hints.items():
        kinds = [each for each in (get_args(hint) or (hint,)) if each is not type(None)]
        if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
            found[name] = kinds[0]
    return found
