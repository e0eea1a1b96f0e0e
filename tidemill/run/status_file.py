"""`status.json`, the state of a living run, and `failure.json`, its first cause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidemill.core.atomic_files import write_json
from tidemill.core.errors import ConfigError, RunFailed, TidemillError
from tidemill.core.user_code import place_of, raised
from tidemill.observability.stall_report import Wait, open_waits
from tidemill.runtime.placement import Handle

EVERY_S = 1.0
STATUS, FAILURE = "status.json", "failure.json"
INTERRUPTED = "interrupted: the same command goes on"
_INTERRUPTIONS = (asyncio.CancelledError, KeyboardInterrupt)


@asynccontextmanager
async def reporting(
    folder: Path, handles: Callable[[], list[Handle[Any]]], more: Callable[[], dict[str, Any]]
) -> AsyncIterator[None]:
    """Keep `status.json` up to date while the body runs. more: further entries, as JSON data."""
    started = time.time()

    def write() -> None:
        processes = [asdict(handle.vitals()) for handle in handles()]
        about = {"pid": os.getpid(), "started": started, "at": time.time(), "processes": processes, "waits": _together()}
        with contextlib.suppress(OSError):  # the ledger reports a full disk
            write_json(folder / STATUS, about | more(), lasting=False)  # in the event loop: no waiting for the disk

    async def keep_writing() -> None:
        while True:
            write()
            await asyncio.sleep(EVERY_S)  # bounded: as long as the body runs

    task = asyncio.create_task(keep_writing())
    try:
        yield
    finally:
        task.cancel()
        write()


def record_failure(folder: Path, error: BaseException) -> None:
    """Write the first cause of a run's end to `failure.json`. Never hides the error itself."""
    with contextlib.suppress(OSError):
        about = {
            "at": time.time(),
            "pid": os.getpid(),
            "kind": type(error).__name__,
            "message": _message(error),
            "trace": _trace(error),
            "whole": _is_whole(error),
        }
        write_json(folder / FAILURE, about)


def _message(error: BaseException) -> str:
    """The error's own sentence; of an exception that is none of ours and has come from a user's file, also its line."""
    if isinstance(error, _INTERRUPTIONS):
        return str(error) or INTERRUPTED
    return str(error) if isinstance(error, TidemillError) or not place_of(error) else raised(error)


def _is_whole(error: BaseException) -> bool:
    """The message says what the user is to mend: our traceback beside it would only hide it."""
    others = isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, BaseExceptionGroup)
    ended = isinstance(error, RunFailed) and not others and not getattr(error, "__notes__", ())
    return isinstance(error, ConfigError) or ended


def _trace(error: BaseException) -> str:
    """The traceback of an error and of its causes, with notes that hold other processes' tracebacks."""
    parts, each = list[str](), error
    while True:
        parts.insert(0, "".join(traceback.format_exception(each, chain=False)))
        if each.__cause__ is None or isinstance(each.__cause__, BaseExceptionGroup):  # cancellations
            return "\nwhich led to:\n\n".join(parts)
        each = each.__cause__


def forget_end(folder: Path) -> None:
    """Remove the status and the failure that an earlier process left."""
    for name in (FAILURE, STATUS):
        (folder / name).unlink(missing_ok=True)


def _together() -> list[dict[str, Any]]:
    """Open waits, equal ones as one with their number, the longest first."""
    groups: dict[tuple[str, str], list[Wait]] = {}
    for wait in open_waits():
        groups.setdefault((wait.peer, wait.what), []).append(wait)
    return [
        {"peer": peer, "what": what, "count": len(waits), "since": waits[0].since, "limit_s": waits[0].limit_s}
        for (peer, what), waits in groups.items()
    ]
