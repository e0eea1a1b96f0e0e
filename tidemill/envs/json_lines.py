"""Reader of JSON-lines files, whose errors name the line that cannot be read.

Byte-order marks, Windows line ends and blank lines are skipped. `NaN` is read as null, its meaning in files made from
tables.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError

_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def json_lines(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over (place, row), with places such as "'rows.jsonl', line 3".

    name: the file's name in messages. Raises ConfigError when the file cannot be read, or a line is not one JSON object.
    """
    for number, line in enumerate(_text(path, name).split("\n"), 1):  # splitlines() would also split at U+2028 in a string
        line = line.removeprefix("\ufeff")  # at the start of a file, or within joined files
        if line.strip():
            yield (where := f"{name}, line {number}"), _row(line, where)


def _text(path: Path, name: str) -> str:
    raw = b""
    try:
        found = path.resolve()  # for a shell's `<(command)` this does not exist, and the pipe is read
        if found.exists() and not found.is_file():
            raise ConfigError(f"{name} is a {'folder' if found.is_dir() else 'device or pipe'}: give a file of JSON lines")
        raw = path.read_bytes()
        return raw.decode(next((each for mark, each in _MARKS.items() if raw.startswith(mark)), "utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist: give the path of a file of JSON lines") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}, line {line} holds the byte 0x{raw[error.start]:02x}, which is no {error.encoding}: save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path that no system accepts
        raise ConfigError(f"{name} is not readable: {error}") from None


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=_once, parse_constant=_constant)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested deeper than can be read") from None
    except ValueError:  # Python's limit of digits
        raise ConfigError(f"{where} holds a number of more than 4,300 digits: write it as a text") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a {type(row).__name__}: expected one object a line")
    return row


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ConfigError(f"gives the key {twice!r:.80} twice: keep one of them")
    return found


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)
