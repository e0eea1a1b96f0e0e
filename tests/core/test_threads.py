"""Blocking work beside an event loop, when it is no longer wanted."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from typing import Any

import pytest

from tidemill.core.executors import background, in_thread


async def test_work_that_gives_up_when_it_is_cancelled_says_nothing() -> None:
    begun, stop, ended, told = threading.Event(), threading.Event(), [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def work() -> None:
        begun.set()
        assert stop.wait(10)
        ended.append(True)
        raise InterruptedError("stopped while it was read")

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(in_thread(work, stop=stop))
        while not begun.is_set():
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    await cancelled()
    assert ended, "whoever goes on must find nobody else in the folder"
    gc.collect()
    await asyncio.sleep(0)
    assert not told


async def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    def work(given: Any) -> None:
        raise ValueError(given)

    with pytest.raises(ValueError, match="seven"):
        await in_thread(work, "seven")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
async def test_work_in_the_background_stands_back_and_nothing_else_does() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    with background("behind") as pool:
        assert await in_thread(priority, pool=pool) == min(before + 5, 19)
        assert await in_thread(priority) == before
    assert priority() == before
