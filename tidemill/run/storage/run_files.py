"""A run's JSON files: the keys that are read from them, and refusal of damaged ones in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import CodecError, ConfigError
from tidemill.core.serialization import parse_json


class _Wait(msgspec.Struct):
    peer: str
    what: str
    count: int
    since: float
    limit_s: float | None


class _Process(msgspec.Struct):
    name: str
    pid: int
    alive: bool
    heard: float
    busy: list[tuple[str, float]]


class Status(msgspec.Struct):
    """`status.json`: see `status_file`."""

    pid: int
    at: float
    waits: list[_Wait]
    processes: list[_Process]


class Failure(msgspec.Struct):
    """`failure.json`: see `status_file`."""

    at: float
    kind: str
    message: str
    trace: str
    whole: bool = False  # the message says all that there is to mend, and no traceback is shown beside it


class Recipe(msgspec.Struct):
    """`config.json`: the key that is read before the whole is checked."""

    steps: int


class _Groups(msgspec.Struct):
    admitted: int
    trained: int
    dropped: dict[str, int]
    pending: int
    lost: int


class RunReport(msgspec.Struct):
    """`report.json` and `interrupted.json`: the entries that are shown of every run."""

    steps: int
    wall_s: float
    groups: _Groups
    accuracy_before: float | None
    accuracy_after: float | None
    held_out: int | None


def read_json(path: Path, kind: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """A JSON object from a file, with the keys of `kind`. Raises ConfigError, which names the file."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, CodecError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, expected an object")
    try:
        msgspec.convert(value, kind or dict)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} is not what a run writes ({error}): put the run's own back, or move this one away"
        ) from None
    return value
