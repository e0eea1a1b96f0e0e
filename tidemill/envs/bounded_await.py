"""Time limits for a user's code that is awaited in this process, with its failures contained."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from tidemill.core.errors import Overdue

T = TypeVar("T")

GRACE_S = 1.0  # time for a cancelled coroutine to clean up
logger = logging.getLogger(__name__)
_abandoned: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks weakly


async def bounded(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Await a coroutine for at most `limit_s` seconds; returns and raises what it does.

    Raises Overdue at the limit, also when the coroutine cannot be cancelled (because of a bare `except:` in a loop): it is
    then left behind. SystemExit, and a cancellation that nobody requested, become RuntimeError: the first would end the
    event loop, the second would silently end the task that waits here.
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
    """Call a blocking function in a thread of its own and wait for at most `limit_s` seconds.

    Raises Overdue at the limit. The thread then goes on by itself, because nothing can end it.
    """
    loop, told = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(result: Any, error: Exception | None) -> None:
        if not told.done():
            told.set_result(result) if error is None else told.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except StopIteration as stop:  # a future refuses this exception
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="user code", daemon=True).start()
    await asyncio.wait({told}, timeout=limit_s)
    if not told.done():
        told.cancel()
        raise Overdue(f"no result within {limit_s:g} s")
    return told.result()


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception, so that the event loop does not report it as never retrieved.

    The caller may have been cancelled at the same time, and would then not have looked.
    """
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
