"""Typed configuration: frozen models <- TOML files (later wins) <- `a.b.c=value` overrides.

Each component keeps its own `Config` beside it (`*_settings.py`); `run.recipe` puts them together. Unions are told
apart by `kind`. An unknown key, a wrong type or a value out of range is a `ConfigError`: one sentence that says what was
given, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tidemill.core.errors import ConfigError


class Config(BaseModel):
    """Base of every settings class."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
    called_elsewhere: ClassVar[Mapping[str, str]] = {}  # names that people bring along, and where it is here
    not_yet: ClassVar[Mapping[str, str]] = {}  # names of what does not exist here, and what there is instead
    not_yet_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # key -> values that do not exist here, and why

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, given: Any) -> Any:
        """A table that names no `kind` means the default one."""
        if not isinstance(given, dict):
            return given
        defaults = ((name, f.default) for name, f in cls.model_fields.items() if isinstance(f.default, Config))
        kinds = {name: table.__dict__["kind"] for name, table in defaults if "kind" in type(table).model_fields}
        tables = {key: value for key, value in given.items() if key in kinds and isinstance(value, dict)}
        return {**given, **{key: {"kind": kinds[key], **value} for key, value in tables.items()}}

    @classmethod
    def expanded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """`tree` with short forms (`env = "guess"`) as the tables that they stand for, for overrides."""
        return tree

    @classmethod
    def variants(cls) -> list[type[Config]]:
        """The settings classes that a field of this type may hold; several if it has a registry."""
        return [cls]


_TOO_DEEP = "the settings are nested too deep: expected tables of keys and values"


C = TypeVar("C", bound=Config)


def load(kind: type[C], files: Iterable[str | Path] = (), overrides: Iterable[str] = (), base: Mapping | None = None) -> C:
    """Build `kind` from `base`, `files` and overrides; a later source wins. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for part in (dict(base or {}), *(_read(Path(f)) for f in files), *map(_override, overrides)):
        try:
            _merge(tree, kind.expanded(part))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except RecursionError:
            raise ConfigError(_TOO_DEEP) from None
    return build(kind, tree)


def build(kind: type[C], tree: Mapping[str, Any]) -> C:
    try:
        return kind.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(kind, e) for e in error.errors()[:3])) from None
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None


def dump(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain JSON data."""
    return config.model_dump(mode="json")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # a mark that Windows puts first
    except FileNotFoundError:
        raise ConfigError(f"recipe {str(path)!r} does not exist: give the path of a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"recipe {str(path)!r} is a folder: give the path of a TOML file") from None
    except (OSError, ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and numbers of 5000 digits
        raise ConfigError(f"recipe {str(path)!r} is not readable as TOML: {error}") from None


def _override(item: str) -> dict[str, Any]:
    key, separator, raw = item.lstrip("-").partition("=")
    if not separator or not key:
        raise ConfigError(f"override {item!r}: expected key=value or key.sub=value")
    try:
        value: Any = tomllib.loads(f"x = {raw}")["x"]
    except (ValueError, RecursionError):
        value = None if raw == "none" else raw
    for part in reversed(key.replace("-", "_").split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Deep merge. A table whose `kind` changes replaces the old one."""
    for key, value in tree.items():
        old = into.get(key)
        if isinstance(value, Mapping):
            if not isinstance(old, dict) or ("kind" in old and value.get("kind", old["kind"]) != old["kind"]):
                old = {}
            into[key] = dict(old)
            _merge(into[key], value)
        else:
            into[key] = value


def _sentence(kind: type[Config], error: Any) -> str:
    where, known = _locate(kind, [str(p) for p in error["loc"]], error["type"] == "extra_forbidden")
    key = ".".join(where) or kind.__name__
    given = error.get("input")
    if isinstance(given, str) and (missing := kind.not_yet_values.get(key, {}).get(given.lower())):
        return f"{key} = {given!r}: {missing}"
    if error["type"] == "extra_forbidden":
        return _unknown(kind, where, known, given)
    if isinstance(given, dict) and error["type"] in ("string_type", "value_error"):  # a plain value's place, or a table
        named = [leaf for leaf in _leaves(given, key) if leaf in kind.called_elsewhere]
        if told := _told(kind, named):
            return told
    if error["type"] == "missing":
        return f"{key!r} is required and was not given"
    if error["type"] == "union_tag_invalid":
        return f"{key}.kind = {error['ctx']['tag']!r}: should be one of {error['ctx']['expected_tags']}"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if where else message
    return f"{key} = {given!r}: {message}"


MOST_LEAVES = 5  # keys of an unknown table that are explained


def _unknown(kind: type[Config], where: list[str], known: list[str], given: Any) -> str:
    """A key that does not exist: what it is called here, that it does not exist yet, or what it resembles."""
    key = ".".join(where)
    leaves = [*_leaves(given, key)]
    if told := _told(kind, leaves):
        return told
    if homes := _homes(kind, where[-1]):
        return f"unknown key {key!r}; here it is {' or '.join(map(repr, homes))}"
    near = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*where[:-1], near[0]])!r}?" if near else f"known here: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _told(kind: type[Config], leaves: list[str]) -> str:
    """Explanations of those keys that are known by another name or do not exist yet; "" if none is."""
    told = dict.fromkeys(said for leaf in leaves if (said := _explained(kind, leaf)))
    more = f"; and {len(told) - MOST_LEAVES} more" if len(told) > MOST_LEAVES else ""
    return "; ".join([*told][:MOST_LEAVES]) + more


def _explained(kind: type[Config], key: str) -> str:
    """The explanation of a key, by its full name, its tables' names or its parts'; "" if none."""
    parts = key.split(".")
    tables = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    if home := kind.called_elsewhere.get(key):
        return f"unknown key {key!r}; here it is {home}"
    if missing := next((kind.not_yet[name] for name in (*tables, *parts) if name in kind.not_yet), None):
        return f"unknown key {key!r}: {missing}"
    if home := kind.called_elsewhere.get(parts[-1]):
        return f"unknown key {key!r}; here it is {home}"
    whole = kind.not_yet.get(f"{parts[0]}.*")
    return f"unknown key {key!r}: {whole}" if whole else ""


def _leaves(given: Any, key: str) -> Iterable[str]:
    """Full names of the plain values in a table; the key itself for a value that is no table."""
    if not isinstance(given, dict) or not given:
        return [key]
    return [leaf for name, value in given.items() for leaf in _leaves(value, f"{key}.{name}")]


def _locate(kind: type[Config], path: list[str], unknown: bool) -> tuple[list[str], list[str]]:
    """The keys of an error's path without the tags of unions, and the keys known at its end.

    unknown: the path ends with a key that is not known, perhaps called as a tag is.
    """
    candidates, keys, named = [kind], [], False  # named: the next key is a name of the user's, as in `policies.NAME`
    known: list[str] = []
    for place, part in enumerate(path, start=1):
        tagged = [c for c in candidates if "kind" in c.model_fields and c.model_fields["kind"].default == part]
        if tagged and len(candidates) > 1 and not (unknown and place == len(path)):
            candidates = tagged
            continue
        if part in ("alone", "several") and len(candidates) > 1:  # tags of the union of one environment and a list of them
            continue
        keys.append(part)
        if named or part.isdecimal():  # a place in a list
            named = False
            continue
        known = sorted({name for c in candidates for name in c.model_fields})
        annotations = [c.model_fields[part].annotation for c in candidates if part in c.model_fields]
        named = any(get_origin(each) is dict for each in annotations)
        candidates = [table for each in annotations for table in tables_of(each)]
    return keys, known


def _homes(kind: type[Config], name: str, under: str = "") -> list[str]:
    """Every key of this name; below a table of several kinds, if all of them have it."""
    found = []
    for field, about in kind.model_fields.items():
        if field == name:
            found.append(under + field)
        elif tables := tables_of(about.annotation):
            inner = f"{under}{field}.NAME." if get_origin(about.annotation) is dict else f"{under}{field}."
            first, *others = (_homes(table, name, inner) for table in tables)
            found += [home for home in first if all(home in other for other in others)]
    return found


def tables_of(annotation: Any) -> list[type[Config]]:
    """The settings classes that a field of this type may hold; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation.variants()
    return [m for a in get_args(annotation) for m in tables_of(a)]
