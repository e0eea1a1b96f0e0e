"""What a process leaves behind: its log, and how it ended."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 4096
_TAIL_LINES = 15


@dataclass(frozen=True)
class Log:
    path: Path
    since: int  # bytes that earlier processes of this name wrote

    @classmethod
    def at(cls, path: Path) -> Log:
        return cls(path, path.stat().st_size if path.exists() else 0)

    def tail(self) -> str:
        """Where it is, and its last lines, indented; at most `_TAIL_BYTES` are read."""
        with open(self.path, "rb") as file:
            file.seek(max(self.since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
        if not lines:
            return f"its log: {self.path} (empty)"
        return "\n".join([f"its log: {self.path}", *(f"  | {line}" for line in lines)])


def describe(code: int) -> str:
    """An exit status, or a signal's number, negative."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
