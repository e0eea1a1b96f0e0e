"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *given: Any, stop: threading.Event | None = None) -> T:
    """Do `work` in a thread. Cancelled, this ends when the thread does: what that reads or writes is in use until then.

    stop: is set on a cancellation, for work that can give up.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, *given))
    try:
        return await asyncio.shield(working)  # bounded: by the caller's deadline, or by the disk
    except asyncio.CancelledError:
        working.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to nobody: it was to give up
        if stop is not None:
            stop.set()
        await asyncio.wait({working})  # bounded: it reads or writes this machine's memory or files
        raise
