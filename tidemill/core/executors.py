"""Threads for blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_LESS = 5  # steps of "nice": beside one that has all of its own, a thread gets a quarter of a core


def background(name: str) -> ThreadPoolExecutor:
    """A pool of one thread with a lower priority than this process's others, which only Linux can give it."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_stand_back)


def _stand_back() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden here: it is done all the same, beside the others
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _LESS, 19))


async def in_thread(
    work: Callable[..., T], *given: Any, stop: threading.Event | None = None, pool: Executor | None = None
) -> T:
    """Run `work` in a thread and return its result.

    When cancelled, this still waits for the thread to end, because the thread goes on using what it reads or writes.
    stop: an event that a cancellation sets, for work that can give up. pool: the executor; None is the event loop's own.
    """
    working = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(pool, work, *given))
    try:
        return await asyncio.shield(working)  # bounded: by the caller's deadline, or by the disk
    except asyncio.CancelledError:
        # its error is not reported: it was asked to give up  # bounded: it is done
        working.add_done_callback(lambda done: done.cancelled() or done.exception())
        if stop is not None:
            stop.set()
        await asyncio.wait({working})  # bounded: it reads or writes this machine's memory or files
        raise


async def in_deep_thread(work: Callable[[], T], stack: int) -> T:
    """Run `work` in a thread of its own, of lower priority and with a stack of so many bytes, and return its result.

    For code that recurses as deep as its input. A cancellation leaves the thread to itself: `work` has to end by itself, and
    may not use what its caller gives back. What it raises is raised here, whatever it is.
    """
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, raised = None, None
        try:
            _stand_back()
            value = work()
        except BaseException as error:  # the panics of extensions are not Exceptions
            raised = error
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(deliver, value, raised)

    thread = threading.Thread(target=run, name="deep", daemon=True)
    before = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return await result  # bounded: by the caller's deadline
