"""Checks that a run's JSON files hold the keys that are read from them.

A file that was made by hand, or is damaged, is refused in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import ConfigError


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


class Recipe(msgspec.Struct):
    """`config.json`: only the key that is read before the whole is checked."""

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


def expect(path: Path, value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return `value` if it holds what a run writes there. Raises ConfigError, which names the file."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} is not what a run writes ({error}): put the run's own back, or move this one away"
        ) from None
    return value
