"""A user's coroutine that fails leaves nothing behind, not even a complaint."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from tidemill.core.bounded_await import bounded


async def test_what_fails_while_its_waiter_is_cancelled_is_not_complained_of() -> None:
    """An engine's death fails every episode in flight, at the moment at which the run gives them up."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    end = asyncio.Event()

    async def work() -> None:
        await end.wait()
        raise ValueError("the engine died")

    waiter = asyncio.create_task(bounded(work(), 60))
    while not end._waiters:  # pyright: ignore
        await asyncio.sleep(0)
    end.set()
    await asyncio.sleep(0)  # it fails now, and its waiter has not heard of it
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    del waiter
    gc.collect()
    assert complaints == []
