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


def background(name: str, stack: int = 0) -> ThreadPoolExecutor:
    """A pool of one thread with a lower priority than this process's others, which only Linux can give it.

    stack: bytes of its stack, for work that recurses as deep as its input; 0 is the system's usual size.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_stand_back)
    if stack:
        before = threading.stack_size(stack)
        try:
            pool.submit(int)  # so that the thread begins now, with that stack
        finally:
            threading.stack_size(before)
    return pool


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
