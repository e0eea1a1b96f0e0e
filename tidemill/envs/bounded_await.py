"""Awaiting a user's code in this process: what is waited for ends at its limit, and takes nothing else with it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 1.0  # for a coroutine that was cancelled to put things in order
logger = logging.getLogger(__name__)
_abandoned: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks weakly


class Overdue(TimeoutError):
    """The limit came before the result."""


async def bounded(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """What `work` returns or raises. Overdue after `limit_s` seconds, also when it refuses to be cancelled (a bare
    `except:` in a loop does): it is then left to itself.

    SystemExit and a cancellation that nobody asked for are raised as RuntimeError: the one would end the event loop, the
    other, without a word, the task that waits here.
    """
    task = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
        if task.done():
            _seen(task)
        else:
            logger.warning("%s does not end though it was cancelled: it is left behind", work)
            _abandoned.add(task)
            task.add_done_callback(_seen)
    if not task.done() or task.cancelled():
        raise Overdue(f"no result within {limit_s:g} s")
    return task.result()


async def bounded_call(work: Callable[[], T], limit_s: float) -> T:
    """The same of a function that blocks, in a thread of its own. After the limit that goes on by itself: nothing ends a
    thread."""
    loop, told = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(result: Any, error: Exception | None) -> None:
        if not told.done():
            told.set_result(result) if error is None else told.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except StopIteration as stop:  # which a future does not take
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="user code", daemon=True).start()
    await asyncio.wait({told}, timeout=limit_s)
    if not told.done():
        told.cancel()
        raise Overdue(f"no result within {limit_s:g} s")
    return told.result()


def _seen(task: asyncio.Task[Any]) -> None:
    """How it ended is known: whoever waited for it may have been cancelled at the same time, and the event loop would then
    complain, with a traceback for each of a batch, that nobody looked."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work  # bounded: by `bounded`
    except SystemExit as exit_:
        raise RuntimeError(f"SystemExit: {exit_.code}") from exit_
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("CancelledError: it was cancelled from within") from error
