"""Setup inside a worker process before it runs a user's code: limits, pipes, end with the parent.

The code is not trusted to behave. Its prints go to stderr so that they cannot corrupt a frame, its stdin is empty, and
processes that it forks lose the frames. The process dies with the one that started it: its keepers see to that (Linux, see
`keeper`), elsewhere the end of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import BinaryIO

from tidemill.core import fault_injection
from tidemill.runtime.workers.pipe_frames import HEADER_BYTES, framed, size_of

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
kept = False  # set by `keeper`: this process ends with its keepers, and they with the starter


def settle(memory_mb: int, parent: int) -> tuple[int, int]:
    """Set limits, tie this process to its parent, and return the frames' descriptors (in, out).

    memory_mb: MiB of address space, 0 for no limit.
    """
    if not kept:
        die_with(parent)
    _stand_apart()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    fault_injection.belong_to(parent)
    return _take_pipes()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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


def _stand_apart() -> None:
    """On Linux, adopt the orphans of children, and be the first to be killed when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # not everywhere allowed
            file.write("1000")
