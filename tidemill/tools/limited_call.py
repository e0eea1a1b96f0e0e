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


_threads = Places(MOST_THREADS)


async def limited_call(work: Callable[[], Any], limit_s: float, *, awaits: bool = False, place: Places | None = None) -> Any:
    """Call `work` within `limit_s` seconds, waiting included; returns and raises what it does.

    awaits: it is a coroutine function. place: of the object that it belongs to. Raises Overdue at the limit, and
    ToolUnavailable if all threads are held by calls that do not return.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    if place is not None and not await place.take(limit_s):
        raise Overdue("an earlier call of the same object has not returned")
    if awaits:
        try:
            return await bounded(work(), end - clock())
        finally:
            _leave(place)
    try:
        there = await _threads.take(end - clock())
    except asyncio.CancelledError:
        _leave(place)
        raise
    if not there:
        _leave(place)
        raise ToolUnavailable(f"{MOST_THREADS} calls of tools do not return and hold all threads for tools of this process")
    context = copy_context()

    def run() -> Any:
        try:
            return context.run(work)
        finally:
            _leave(_threads)
            _leave(place)

    value = await bounded_call(run, end - clock())
    return await bounded(value, end - clock()) if inspect.iscoroutine(value) else value


def _leave(place: Places | None) -> None:
    if place is not None:
        place.leave()
