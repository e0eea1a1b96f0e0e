"""Standard output whose failures never end a command: closed, full, or ASCII only.

closed by its reader (`| head`)     the rest is discarded silently, and the command's status stays
not open at all (`>&-`)             the null device takes its place, so that no other file gets its number
any other failure (a full disk)     reported once on standard error
an encoding without a character     the nearest ASCII form is written
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill.observability.safe_text import DEGRADE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

QUIET = (errno.EPIPE, errno.EBADF)


class Lenient(io.FileIO):
    """A file descriptor for writing. After its first failure everything is discarded."""

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]) -> None:
        """Write to `descriptor`. lost: called once, with the first failure."""
        super().__init__(descriptor, "w", closefd=False)
        self._lost = lost
        self.failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        while self.failure is None:
            try:
                return os.write(self.fileno(), data)
            except BlockingIOError:
                select.select([], [self], [], 1.0)  # then try again, as a blocking write would
            except OSError as error:
                self.failure = error
                self._lost(error)
        return memoryview(data).nbytes


def guard() -> Callable[[], OSError | None]:
    """Make standard output and error lenient. Returns a function that gives the loss."""
    _open_all()
    out = _lenient("stdout", 1, _say)
    _lenient("stderr", 2, lambda _: None)

    def lost() -> OSError | None:
        sys.stdout.flush()
        failure = out.failure
        return None if failure is None or failure.errno in QUIET else failure

    return lost


def _lenient(name: str, descriptor: int, lost: Callable[[OSError], None]) -> Lenient:
    old, raw = getattr(sys, name), Lenient(descriptor, lost)
    if old is not None:
        if not _is(old, descriptor):  # it is captured: leave it alone
            return raw
        old.flush()
    line = descriptor == 2 or raw.isatty()
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=getattr(old, "encoding", None) or "utf-8", errors=DEGRADE, line_buffering=line
    )
    setattr(sys, name, stream)
    return raw


def _is(stream: io.TextIOBase, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _open_all() -> None:
    """Open the standard streams that are closed, so that no other file gets their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number


def _say(error: OSError) -> None:
    if error.errno not in QUIET:
        print(f"standard output cannot be written ({error.strerror}): nothing more is printed there", file=sys.stderr)
