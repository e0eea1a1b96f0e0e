"""Awaiting within limits: a user's code, with its failures contained; and work that must not be cancelled half-way."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tidemill.core.errors import Overdue

T = TypeVar("T")

GRACE_S = 1.0  # time for a cancelled coroutine to clean up
SHORT_S = 60.0  # for work that is not cancelled half-way
logger = logging.getLogger(__name__)
_abandoned: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks weakly


async def bounded(work: Coroutine[Any, Any, T], limit_s: float, paused_s: Callable[[], float] = lambda: 0.0) -> T:
    """Await a coroutine for at most `limit_s` seconds; returns and raises what it does.

    paused_s: seconds of pauses so far; those within its time are not counted.

    Raises Overdue at the limit, also when the coroutine cannot be cancelled (because of a bare `except:` in a loop): it is
    then left behind. SystemExit, and a cancellation that nobody requested, become RuntimeError: the first would end the
    event loop, the second would silently end the task that waits here.
    """
    task, clock = asyncio.ensure_future(_contained(work)), asyncio.get_running_loop().time
    end = clock() - paused_s() + limit_s
    try:
        await asyncio.wait({task}, timeout=limit_s)
        while not task.done() and (left := end - clock() + paused_s()) > 0:
            await asyncio.wait({task}, timeout=max(left, GRACE_S))
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


async def undivided(work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> T:
    """Await short work that must not be cancelled half-way; returns and raises what it does.

    A caller that is cancelled meanwhile waits for it, and for `undo` of its result, before it is cancelled. A second
    cancellation comes at once, and leaves both to themselves. Raises Overdue after `SHORT_S`, and undoes it then.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=SHORT_S)
        if not task.done():
            raise Overdue(f"no result within {SHORT_S:g} s")
    except BaseException:
        ending = asyncio.ensure_future(_undone(task, undo))
        _abandoned.add(ending)
        ending.add_done_callback(_seen)
        await asyncio.wait({ending}, timeout=SHORT_S)
        raise
    return task.result()


async def _undone(task: asyncio.Task[T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    await asyncio.wait({task}, timeout=10 * SHORT_S)
    if task.done() and not task.cancelled() and task.exception() is None:
        await undo(task.result())


def _in_new_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="user code", daemon=True).start()


async def bounded_call(
    work: Callable[[], T], limit_s: float, begin: Callable[[Callable[[], None]], None] = _in_new_thread
) -> T:
    """Call a blocking function in a thread of its own, which goes on by itself after `limit_s` (Overdue).

    begin: has another thread make the call.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error if _is_plain(error) else _in_its_place(error))

    waiting = asyncio.wrap_future(result)
    begin(run)
    try:
        await asyncio.wait({waiting}, timeout=limit_s)
        if not waiting.done():
            raise Overdue(f"no result within {limit_s:g} s")
        return waiting.result()
    finally:
        waiting.cancel()  # what comes later is dropped


def _is_plain(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, StopIteration)  # which asyncio refuses


def _in_its_place(error: BaseException) -> RuntimeError:
    """An error with the type, text and frames of one that would end more than the call."""
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception, which asyncio would report if a cancelled caller did not look."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # bounded: the task has ended


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work  # bounded: by `bounded`
    except SystemExit as exit_:
        raise RuntimeError(f"SystemExit: {exit_.code}").with_traceback(exit_.__traceback__) from exit_
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("CancelledError: it was cancelled from within") from error
