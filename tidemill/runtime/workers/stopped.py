"""Telling a process that was stopped (SIGSTOP) from one that is slow: it would not go on by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

LOOK_S, LOOKS = 0.25, 6  # between two looks at one that does not answer; as many in a row that find it stopped are enough


async def stopped_instead(pid: int, answer: asyncio.Future[Any]) -> bool:
    """Wait for the answer of a process, or until it is seen to be stopped and to do nothing at all.

    One that is starved by stopping it time and again runs in between, and one that a debugger holds is in another state. We
    may have been stopped ourselves, with everything else: a look that comes late says nothing of the time before it.
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
    """How far a stopped process has come: it has not run between two equal ones. None: it is not stopped, or not there."""
    try:
        process = psutil.Process(pid)
        far = process.cpu_times(), process.num_ctx_switches()
        return far if process.status() == psutil.STATUS_STOPPED else None
    except (psutil.Error, NotImplementedError):
        return None
