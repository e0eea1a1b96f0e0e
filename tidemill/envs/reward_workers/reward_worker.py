"""Worker process that runs reward functions, one call at a time, until its pipe closes.

    python -m tidemill.envs.reward_workers.reward_worker MEMORY_MB PARENT

Processes that the code forks never return into this loop, and the pool kills the whole process group of a worker that is
late. Further isolation of the code is in `runtime.workers.worker_setup`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import BinaryIO

from tidemill.core import fault_injection, serialization
from tidemill.envs.reward_workers.invoke import failed, invoke, load
from tidemill.envs.reward_workers.reward_protocol import MAX_REPLY, Reply, RewardReply, RewardRequest, Started
from tidemill.runtime.workers import worker_setup


def main(memory_mb: int, parent: int) -> None:
    frames_in, frames_out = worker_setup.settle(memory_mb, parent)
    requests, replies = os.fdopen(frames_in, "rb", closefd=False), os.fdopen(frames_out, "wb", buffering=0, closefd=False)
    here, before = os.getpid(), Surroundings()
    while frame := worker_setup.read(requests):
        request: RewardRequest = serialization.decode(frame, RewardRequest)
        reason = load(request)
        _write(replies, Started(request.id))
        fault_injection.reach("reward", "call", request.id)
        outcomes = failed(request, reason) if reason else invoke(request)
        if os.getpid() != here:
            os._exit(0)  # this is a fork made by the function that returned from it as well
        before.restore()
        _write(replies, _done(request, outcomes))


class Surroundings:
    """State of the process that a call may change, put back before the next call.

    It is the working folder, the environment, a pending alarm, the recursion limit and the standard streams.
    """

    def __init__(self) -> None:
        self._folder, self._variables, self._depth = os.getcwd(), dict(os.environ), sys.getrecursionlimit()
        self._streams = sys.stdin, sys.stdout, sys.stderr

    def restore(self) -> None:
        os.chdir(self._folder)
        if os.environ != self._variables:
            os.environ.clear()
            os.environ.update(self._variables)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(self._depth)
        sys.stdin, sys.stdout, sys.stderr = self._streams


def _done(request: RewardRequest, outcomes: list) -> RewardReply:
    done = RewardReply(request.id, outcomes, _has_children())
    size = len(serialization.encode(done))
    if size > MAX_REPLY:
        done = RewardReply(request.id, failed(request, f"{request.name} gave {size} bytes: at most {MAX_REPLY} are taken"))
    return done


def _write(pipe: BinaryIO, message: Reply) -> None:
    worker_setup.write(pipe, serialization.encode(message))


def _has_children() -> bool:
    """True when processes that a call started still exist or were not waited for.

    Their exit statuses are left in place.
    """
    if sys.platform == "darwin":  # no waitid before Python 3.13; there they end when their worker does
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
