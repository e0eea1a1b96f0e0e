"""Loop of a worker that does one call at a time, until its input ends.

Processes that a handler's code forks never return into this loop. What a call changed in the process is put back after it,
and the parent is told when processes of the call are left.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from tidemill.core import serialization
from tidemill.runtime.workers import keeper, worker_setup
from tidemill.runtime.workers.frames import CallBegan, CallResult, WorkerCall, to_worker
from tidemill.runtime.workers.worker_setup import Channel, FrameWriter, Handler, failure

KEPT: list[Callable[[], set[int]]] = []
"""Functions that tell which children this project's own code keeps between calls, such as sandboxes."""


def serve(handler: Handler, most: int, forks: bool = False) -> None:
    """Answer calls with `handler`, in frames of `most` bytes. forks: it keeps processes of its own between calls."""
    frames_in, frames_out = worker_setup.settle()
    pipe, writer, before = os.fdopen(frames_in, "rb", closefd=False), FrameWriter(frames_out, most), Surroundings()
    kind = to_worker(handler.requests, handler.notes)
    while body := worker_setup.read(pipe):
        order = serialization.decode(body, kind)
        if isinstance(order, WorkerCall):  # a cancelled call's worker is killed, so nothing else needs an answer
            _answer(handler, order, writer, before, (lambda: False) if forks else _has_children)


def _answer(
    handler: Handler, call: WorkerCall, writer: FrameWriter, before: Surroundings, children: Callable[[], bool]
) -> None:
    try:
        handler.load(call.request)
        writer.say(CallBegan(call.id))
        value = handler.call(call.request, Channel(call.id, writer.say))
        before.restore()
        writer.say(CallResult(call.id, value, children()))
    except BaseException as error:  # the user's code may raise anything, sys.exit() included
        before.restore()
        writer.say(failure(call.id, error, children()))


class Surroundings:
    """State of the process that a call may change, put back before the next call."""

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


def _has_children() -> bool:
    """True when processes that a call started still exist or were not waited for. They are not reaped here."""
    if sys.platform == "darwin":  # no waitid before Python 3.13; there they end when their worker does
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return not KEPT or bool(keeper.children_now().difference(*(tell() for tell in KEPT)))
