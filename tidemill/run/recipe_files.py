"""Lookup of the files that a recipe names, and comparison of two recipes of one run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tidemill.core.config import Config, build, dump
from tidemill.core.errors import ConfigError
from tidemill.run.frozen_folders import recorded_version

S = TypeVar("S", bound=Config)
TABLES = ("env", "algorithm", "trainer", "policies")
DATA = ("data", "eval_data")  # keys of an environment of rows
ADAPTERS = ("frozen", "start")  # keys of a policy, or an adapter
COMMAND = "command"  # of an agent's environment
MOST_TOLD = 5  # differences that the error names
MAY_CHANGE = frozenset({"run_dir", "steps", "placement", "eval", "profile", "record", "scoring", "supervise"})
"""Keys that may differ when a run is resumed. Any other would change the meaning of the recorded steps."""
OF_RANKS = ("ranks", "shard", "replicas", "reduce")
"""Keys of the trainer that may differ, too: they change no result, but for the rounding of sums."""


def found(config: S, folders: Sequence[Path]) -> S:
    """The recipe with the places of files that lie in `folders`, not in this one.

    Raises ConfigError where FILE.py of FILE.py:NAME is in none of them.
    """
    tree = dump(config)
    placed = _each(tree, lambda place, code: _look(place, folders, code))
    return config if placed == tree else build(type(config), placed)


def absolute(tree: dict[str, Any]) -> dict[str, Any]:
    """Copy of the tree with absolute paths for the files that exist."""
    return _each(tree, lambda place, _: str(Path(place).resolve()) if _there(Path(place)) else place)


def same_file(key: str, old: Any, new: Any) -> bool:
    """True when two values of a key name the same file, one of them by its absolute path."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(a == b or same_file(key, a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return all(old[name] == new[name] or same_file(key, old[name], new[name]) for name in old)
    if key.partition(".")[0] not in TABLES or not (isinstance(old, str) and isinstance(new, str)):
        return False
    if key.rpartition(".")[2] == COMMAND:
        return _same_command(key, old, new)
    short, long = sorted((old, new), key=os.path.isabs)
    if os.path.isabs(short) or not os.path.isabs(long):
        return False
    return long.endswith(f"/{os.path.normpath(short)}") or os.path.abspath(short) == long


def _same_command(key: str, old: str, new: str) -> bool:
    """True when two commands differ only in the places of their Python files."""
    try:
        words = list(zip(shlex.split(old), shlex.split(new), strict=True))
    except ValueError:  # another number of words, or a quotation without an end
        return False
    files = key.removesuffix(f".{COMMAND}")
    return all(a == b or (a.endswith(".py") and same_file(files, a, b)) for a, b in words)


def _look(place: str, folders: Sequence[Path], code: bool) -> str:
    path, here = Path(place), Path.cwd()
    others = [folder for folder in dict.fromkeys(each.resolve() for each in folders) if folder != here]
    if _there(path) or not others or place.startswith("~"):  # a path in the home folder is absolute
        return place
    tries = [folder / (path.name if path.is_absolute() else path) for folder in (here, *others)]
    if at := next((each for each in tries if _there(each)), None):
        return str(at.resolve())
    if not code:
        return place
    places = " or ".join(str(each) for each in (here, *others))
    raise ConfigError(f"file {place!r} does not exist in {places}: give its whole path, or put it there")


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the system, or a folder without permission
        return False


def _each(tree: dict[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    return {key: _walk(value, change) if key in TABLES else value for key, value in tree.items()}


def _walk(value: Any, change: Callable[[str, bool], str], key: str = "") -> Any:
    match value:
        case dict():
            return {name: _walk(each, change, str(name)) for name, each in value.items()}
        case list():
            return [_walk(each, change, key) for each in value]
        case str() if key == COMMAND:
            return _command(value, change)
        case str() if ".py:" in value:
            place, _, name = value.rpartition(":")
            return f"{change(place, True)}:{name}" if place.endswith(".py") else value
        case str() if key in DATA and value:
            return change(value, False)
        case str() if key in ADAPTERS and value:
            if (recorded := recorded_version(value)) is not None:
                return str(replace(recorded, run=Path(change(str(recorded.run), False))))
            return change(value, False)
    return value


def _command(value: str, change: Callable[[str, bool], str]) -> str:
    """A command with the places of its Python files."""
    try:
        words = shlex.split(value)
    except ValueError:  # the environment says what is wrong with it
        return value
    placed = [change(word, False) if word.endswith(".py") else word for word in words]
    return value if placed == words else shlex.join(placed)


def check_same_run(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError if `new` is not the recipe of the run in `folder`, recorded as `old`."""
    if new.get("deterministic"):
        threads = ("engine_threads", "trainer_threads")
        if any(old["placement"][key] != new["placement"][key] for key in threads):
            raise ConfigError(
                f"{folder} is deterministic: with other numbers of threads its sums would differ in their bits"
            )
        if any(old.get("trainer", {}).get(key) != new.get("trainer", {}).get(key) for key in OF_RANKS):
            raise ConfigError(f"{folder} is deterministic: with other ranks its sums would differ in their bits")
        if len({bool(tree["placement"].get("reference_engines")) for tree in (old, new)}) == 2:
            raise ConfigError(
                f"{folder} is deterministic, and trainer and engines round differently: leave "
                "placement.reference_engines as it was"
            )
    was, now = ({k: v for k, v in tree.items() if k not in MAY_CHANGE} for tree in (old, new))
    for tree in (was, now):
        tree["trainer"] = {key: value for key, value in tree.get("trainer", {}).items() if key not in OF_RANKS}
    if changed := list(_differences(was, now)):
        more = f" and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
        raise ConfigError(
            f"{folder} holds a run of another recipe: {'; '.join(changed[:MOST_TOLD])}{more}. Use another run_dir, or "
            f"change only {', '.join(sorted(MAY_CHANGE - {'run_dir'}))}, trainer.{', trainer.'.join(OF_RANKS)}"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not same_file(key, old, new):
        yield f"{key} was {old!r} and is {new!r}"
