"""Programs and what came of them, and their frames to and from a supervisor."""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

LENGTH = struct.Struct("<I")
MOST_HEADER = 1 << 16  # bytes of a result's header


@dataclass(frozen=True, slots=True)
class SandboxedProgram:
    """A program: Python source, or a command."""

    python: str = ""  # source that runs as __main__, in an interpreter that is warm
    argv: tuple[str, ...] = ()  # a command, found by PATH in the sandbox's system folders; or the source's arguments
    files: Mapping[str, bytes] = field(default_factory=dict)  # in its folder, by relative path
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.python or self.argv, "a program needs source or a command"
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file {name!r} of a sandboxed program: expected a path below its folder")


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of one run of a program."""

    stdout: bytes
    stderr: bytes
    status: int  # exit status; minus the signal that ended it
    limit: str  # the limit at which it was ended: seconds, cpu_seconds, memory, disk, processes, output; "" if none
    seconds: float
    peak_bytes: int  # most memory of its largest process
    level: str  # how it was isolated

    @property
    def succeeded(self) -> bool:
        return self.status == 0 and not self.limit

    def describe(self) -> str:
        """The way it ended, in a few words."""
        if self.limit:
            return f"was ended at its limit of {self.limit.replace('_', ' ')}"
        if self.status < 0:
            number = -self.status
            known = number in [*signal.Signals]
            return f"was ended by {signal.Signals(number).name if known else f'signal {number}'}"
        return f"ended with status {self.status}"


def request(program: SandboxedProgram, stdin: bytes, paths: Sequence[str], env: Mapping[str, str]) -> bytes:
    """The frame that has a program run once."""
    blobs = [stdin, *program.files.values()]
    header = {
        "python": program.python,
        "argv": [] if program.python else list(program.argv),
        "args": list(program.argv) if program.python else [],
        "env": {**env, **program.env},
        "paths": list(paths),
        "files": list(program.files),
        "blobs": [len(blob) for blob in blobs],
    }
    text = json.dumps(header).encode()
    return b"".join([LENGTH.pack(len(text)), text, *blobs])


def result_of(header: Mapping[str, Any], stdout: bytes, stderr: bytes, level: str) -> Execution:
    """The execution that a supervisor's result tells of."""
    numbers = int(header["status"]), float(header["seconds"]), int(header["peak"])
    return Execution(stdout, stderr, numbers[0], str(header["limit"]), numbers[1], numbers[2], level)
