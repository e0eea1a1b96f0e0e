"""Process logs: the tail of a log, exit codes in words, warnings to a file."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

_TAIL_BYTES = 4096
_TAIL_LINES = 15
MOST_BYTES = 4 << 20  # per file of warnings (there are two): an environment may fail a million times


@dataclass(frozen=True)
class Log:
    """A process's log file, from the byte at which this process began to write."""

    path: Path
    since: int  # bytes that earlier processes of this name wrote

    @classmethod
    def at(cls, path: Path) -> Log:
        return cls(path, path.stat().st_size if path.exists() else 0)

    def tail(self) -> str:
        """The log's path and its last lines, indented; at most `_TAIL_BYTES` are read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(self.since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:  # must not hide the error that this is part of
            return f"its log: {self.path} (cannot be read: {error.strerror})"
        if not lines:
            return f"its log: {self.path} (empty)"
        return "\n".join([f"its log: {self.path}", *(f"  | {line}" for line in lines)])


def describe(code: int) -> str:
    """An exit code in words. code: an exit status, or a signal's number, negative."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class _Warnings(RotatingFileHandler):
    def __init__(self, path: Path, begun: Callable[[Path], None]) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", delay=True, errors="backslashreplace")
        self._path = path
        self._begun: Callable[[Path], None] | None = begun
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if begun := self._begun:
            self._begun = None
            begun(self._path)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a warning that cannot be written: a full disk ends the run with an error of its own."""


@contextmanager
def warnings_to(path: Path, begun: Callable[[Path], None]) -> Iterator[None]:
    """Write the warnings of this process to a file, with their tracebacks; `begun` is called at the first."""
    handler, logger = _Warnings(path, begun), logging.getLogger("tidemill")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
