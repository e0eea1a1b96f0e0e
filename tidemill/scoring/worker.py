"""The process that runs reward functions, `python -m tidemill.scoring.worker MEMORY_MB`: one call at a time, for ever.

The code it runs is not trusted to behave: its prints go to stderr so that they cannot corrupt a frame, its stdin is
empty, processes that it forks lose the frames and never return into this loop, and the pool kills the whole process
group of a worker that is late. The worker dies with its parent, by the kernel's word (Linux) or by end of file.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import BinaryIO

from tidemill import codec, faults
from tidemill.scoring.frames import HEADER, MAX_REPLY, Done, Reply, Request, Started
from tidemill.scoring.invoke import failed, invoke, load

_PR_SET_PDEATHSIG = 1


def main(memory_mb: int, parent: int) -> None:
    _die_with(parent)
    _limit(memory_mb)
    faults.belong_to(parent)
    requests, replies = _take_pipes()
    here = os.getpid()
    while frame := _read(requests):
        request: Request = codec.decode(frame, Request)
        reason = load(request)
        _write(replies, Started(request.id))
        faults.reach("reward", "call", request.id)
        outcomes = failed(request, reason) if reason else invoke(request)
        if os.getpid() != here:
            os._exit(0)  # a fork that the function made came back from it too
        _write(replies, _done(request, outcomes))


def _done(request: Request, outcomes: list) -> Done:
    done = Done(request.id, outcomes, _has_children())
    size = len(codec.encode(done))
    if size > MAX_REPLY:
        done = Done(request.id, failed(request, f"{request.name} gave {size} bytes: at most {MAX_REPLY} are taken"))
    return done


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames off stdin and stdout, and close them in every process forked from here."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)

    def lose_frames() -> None:
        os.close(requests)
        os.close(replies)

    os.register_at_fork(after_in_child=lose_frames)
    return os.fdopen(requests, "rb", closefd=False), os.fdopen(replies, "wb", buffering=0, closefd=False)


def _read(pipe: BinaryIO) -> bytes:
    """The next frame; empty at the end of file."""
    header = pipe.read(HEADER.size)
    return pipe.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


def _write(pipe: BinaryIO, message: Reply) -> None:
    body = codec.encode(message)
    left = memoryview(HEADER.pack(len(body)) + body)
    while left:
        left = left[pipe.write(left) :]


def _has_children() -> bool:
    """Whether processes that a call started are still there (or were not waited for). Takes nobody's exit status."""
    if sys.platform == "darwin":  # has no waitid before Python 3.13; there they go when their worker goes
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except ChildProcessError:
        return False


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
