"""`tidemill settings [TABLE]`: lists every key of a recipe, read from its class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rich.text import Text

from tidemill.cli.commands.screen import console, print_json, print_rows
from tidemill.core.config import Config, tables_of
from tidemill.core.errors import ConfigError
from tidemill.core.registry import KindSettings
from tidemill.run.recipe import RunConfig

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "none"}


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    kinds: tuple[str, ...]  # kinds of its table that have it; () if all have
    takes: str
    default: str | None  # as JSON, or "none"; None: it must be given
    what: str


def settings(table: str, as_json: bool) -> int:
    """Print the settings below `table`, or all. Returns 0. Raises ConfigError for an unknown name."""
    every = known()
    found = [each for each in every if not table or each.key == table or each.key.startswith(f"{table}.")]
    if not found:
        tables = sorted({each.key.partition(".")[0] for each in every})
        raise ConfigError(f"no setting is called {table!r}: expected one of {', '.join(tables)}, or a key below one")
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_rows(console(), [(each.key, _said(each)) for each in found])
    return 0


def _said(setting: Setting) -> Text:
    default = "must be given" if setting.default is None else setting.default
    kinds = f". Only for kind {' or '.join(setting.kinds)}" if setting.kinds else ""
    return Text.assemble((default, "bold"), f"   {setting.takes}. {setting.what}{kinds}")


def known() -> list[Setting]:
    """All settings in order; one that several kinds of a table share is one entry."""
    found = dict[Setting, tuple[str, ...]]()  # setting -> kinds
    for each in _below(RunConfig, None, "", ()):
        alike = replace(each, kinds=())
        found[alike] = (*found.get(alike, ()), *each.kinds)
    every = dict[str, set[str]]()  # kinds of each table
    for each, kinds in found.items():
        every.setdefault(each.key.partition(".")[0], set()).update(kinds)
    shared = {each for each, kinds in found.items() if set(kinds) == every[each.key.partition(".")[0]]}
    return [replace(each, kinds=() if each in shared else kinds) for each, kinds in found.items()]


def _below(table: type[Config], given: Config | None, under: str, kinds: tuple[str, ...]) -> Iterator[Setting]:
    """The settings of a table. given: its default. kinds: the table's kind, if there are several."""
    for name, field in table.model_fields.items():
        required = given is None and field.is_required()
        default = getattr(given, name) if given else None if required else field.get_default(call_default_factory=True)
        inner = list(dict.fromkeys(tables_of(field.annotation)))  # an environment and a list of them have the same tables
        several = [each.model_fields["kind"].default for each in inner] if len(inner) > 1 else []
        if several:
            kind = _written(default.kind_name) if isinstance(default, KindSettings) else None
            yield Setting(f"{under}{name}.kind", kinds, " | ".join(map(_written, several)), kind, f"Kind of {name}")
        for number, each in enumerate(inner):
            same = default if isinstance(default, each) else None
            yield from _below(each, same, f"{under}{name}.", (several[number],) if several else kinds)
        if not inner and not (kinds and name == "kind"):
            written = None if required else _written(default)
            yield Setting(under + name, kinds, _takes(field.annotation), written, field.description or "")


def _takes(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _takes(inner[0])
    if origin is Literal:
        return " | ".join(_written(each) for each in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_takes, inner)))
    if origin in (list, tuple, frozenset, set):
        return f"a list of {_takes(inner[0])}" if inner else "a list"
    if origin is dict or annotation is dict:
        return "a table"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value, default=lambda each: sorted(each) if isinstance(each, set | frozenset) else str(each))
