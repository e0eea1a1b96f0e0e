"""Detection of a stopped process (SIGSTOP), which unlike a slow one never goes on by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

LOOK_S, LOOKS = 0.25, 6  # seconds between two looks; so many in a row must find the process stopped


async def stopped_instead(pid: int, answer: asyncio.Future[Any]) -> bool:
    """Wait for a process's answer, or until it is stopped for good; True if it is.

    One that is stopped and continued over and over still runs in between. This process may have been stopped too: a look
    that comes late says nothing about the time before it.
    """
    looks, seen, looked = 0, None, time.monotonic()
    while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
        late, looked = time.monotonic() - looked > 2 * LOOK_S, time.monotonic()
        before, seen = seen, stopped_at(pid)
        looks = looks + 1 if seen is not None and seen == before and not late else 0
        if looks == LOOKS:
            return True
    return False


def stopped_at(pid: int) -> tuple[Any, ...] | None:
    """CPU time and context switches, equal while a stopped process has not run; None if not stopped or gone."""
    try:
        process = psutil.Process(pid)
        far = process.cpu_times(), process.num_ctx_switches()
        return far if process.status() == psutil.STATUS_STOPPED else None
    except (psutil.Error, NotImplementedError):
        return None
