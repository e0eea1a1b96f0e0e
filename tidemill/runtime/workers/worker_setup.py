"""Setup inside a worker process before it runs a user's code: limits, pipes, end with the parent.

The code is not trusted to behave. Its prints go to stderr so that they cannot corrupt a frame, its stdin is empty, and
processes that it forks lose the frames. The process dies with the one that started it: its keepers see to that (Linux, see
`keeper`), elsewhere the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from tidemill.core import fault_injection, serialization
from tidemill.core.errors import ConfigError
from tidemill.core.outcomes import SHOWN, plain
from tidemill.core.user_code import raised
from tidemill.runtime.workers.frames import HEADER_BYTES, CallFailure, WorkerNote, framed, size_of
from tidemill.runtime.workers.keeper import KEEPERS, die_with_parent

_REASON, _TRACE = 2000, 6000  # characters of a sentence for the user, and of a stack, that are sent


class Channel:
    """One call inside a worker: its number, and messages to and from its caller."""

    def __init__(self, number: int, say: Callable[[Any], None]) -> None:
        self.id, self._say = number, say
        self.hear: Callable[[Any], None] = lambda message: None  # set by a handler that expects messages
        self.cancelled = False

    def tell(self, message: Any) -> None:
        """Send a message. Raises ValueError, and sends nothing, when it is too long or cannot be encoded."""
        self._say(WorkerNote(self.id, message))


class Handler(Protocol):
    """Interface of the code inside a worker; `call` is a coroutine where many calls run at once."""

    requests: Any  # the type of the requests
    notes: Any  # the type of the messages to a running call

    def load(self, request: Any) -> None:
        """Import what the request needs, before its limit begins."""
        ...

    def call(self, request: Any, channel: Channel) -> Any: ...


class FrameWriter:
    """Writes frames to the parent."""

    def __init__(self, frames_out: int, most: int) -> None:
        self._pipe, self._most, self._here = os.fdopen(frames_out, "wb", buffering=0, closefd=False), most, os.getpid()

    def say(self, frame: Any) -> None:
        """Send a frame. Raises ValueError, and sends nothing, when it is too long or cannot be encoded."""
        if os.getpid() != self._here:
            os._exit(0)  # this is a fork made by the user's code that returned from it as well
        try:
            body = serialization.encode(frame)
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if len(body) > self._most:
            raise ValueError(f"{len(body)} bytes, at most {self._most} are taken")
        write(self._pipe, body)


def failure(number: int, error: BaseException, children: bool = False) -> CallFailure:
    """The frame for an exception of the user's code; of a gigabyte's message, too, a short one."""
    from traceback import format_tb  # only here: most workers never need it

    reason = raised(error, _REASON if isinstance(error, ConfigError) else SHOWN)
    trace = plain("".join(format_tb(error.__traceback__))[-_TRACE:])
    return CallFailure(number, reason, f"{trace}{reason}", children)


def settle() -> tuple[int, int]:
    """Set limits by the program's arguments (MiB, 0: none; parent), and return the frames' descriptors (in, out)."""
    memory_mb, parent = int(sys.argv[1]), int(sys.argv[2])
    if not KEEPERS:  # which end with the starter, and this process with them
        die_with(parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # Linux; not everywhere allowed
        file.write("1000")  # the first to be killed when memory runs out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    fault_injection.belong_to(parent)
    return _take_pipes()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux only), or has ended."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def read(pipe: BinaryIO) -> bytes:
    """The next frame; empty at the end of file."""
    header = pipe.read(HEADER_BYTES)  # bounded: it lives as long as the process that started it
    return pipe.read(size_of(header)) if len(header) == HEADER_BYTES else b""  # bounded: as above


def write(pipe: BinaryIO | socket.SocketIO, body: bytes) -> None:
    """Write one frame to an unbuffered pipe."""
    left = memoryview(framed(body))
    while left:
        left = left[pipe.write(left) :]


def _take_pipes() -> tuple[int, int]:
    """Move the frames off stdin and stdout, and close them in every process forked from here."""
    frames_in, frames_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)

    def lose_frames() -> None:
        os.close(frames_in)
        os.close(frames_out)

    os.register_at_fork(after_in_child=lose_frames)
    return frames_in, frames_out
