"""Calls of a user's functions with a time limit: coroutines on the event loop, blocking functions in threads.

A thread cannot be killed. A call that is late goes on in its thread and holds its place there, and its object's, until it
returns; the worker process around it is what can be killed.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from tidemill.core.bounded_await import bounded, bounded_call
from tidemill.core.errors import Overdue, ToolUnavailable

MOST_THREADS = 32  # blocking calls of tools at a time, in one process


class Places:
    """A number of places that coroutines of any event loop wait for, in order, and that any thread may leave."""

    def __init__(self, most: int) -> None:
        self._free, self._waiting = most, deque[Future[None]]()
        self._lock = threading.Lock()  # bounded: nothing inside waits

    async def take(self, limit_s: float) -> bool:
        """Take a place; False if none became free in time."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            turn = Future[None]()
            self._waiting.append(turn)
        try:
            await asyncio.wait({asyncio.wrap_future(turn)}, timeout=limit_s)
        except asyncio.CancelledError:
            if not turn.cancel():
                self.leave()
            raise
        return not turn.cancel()  # which fails once the place was given

    def leave(self) -> None:
        """Give a place to the one who has waited longest."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


class OwnThread:
    """One thread for all calls of one object: some libraries can only be used from the thread that opened them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="user code of one object", daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        self._calls.put(work)

    def close(self) -> None:
        """Let the thread end when it has done what it was given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:  # bounded: `close` ends it, or the process does
            work()


_threads = Places(MOST_THREADS)


async def limited_call(
    work: Callable[[], Any],
    limit_s: float,
    *,
    awaits: bool = False,
    place: Places | None = None,
    thread: OwnThread | None = None,
) -> Any:
    """Call `work` within `limit_s` seconds, waiting included; returns and raises what it does.

    awaits: it is a coroutine function. place: of the object that it belongs to. thread: makes the call, instead of one of
    those that all share. Raises Overdue at the limit, and ToolUnavailable if calls that do not return hold all threads.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    if place is not None and not await place.take(limit_s):
        raise Overdue("an earlier call of the same object has not returned")
    held = [] if place is None else [place]
    if awaits:
        try:
            return await bounded(work(), end - clock())
        finally:
            _leave(held)
    if thread is None:
        try:
            there = await _threads.take(end - clock())
        except asyncio.CancelledError:
            _leave(held)
            raise
        if not there:
            _leave(held)
            raise ToolUnavailable(f"{MOST_THREADS} calls of tools that do not return hold all threads for tools")
        held.append(_threads)
    context = copy_context()

    def run() -> Any:
        try:
            return context.run(work)
        finally:
            _leave(held)

    begin = {} if thread is None else {"begin": thread.begin}
    value = await bounded_call(run, end - clock(), **begin)
    return await bounded(value, end - clock()) if inspect.iscoroutine(value) else value


def _leave(places: list[Places]) -> None:
    for each in places:
        each.leave()
