"""What a run says of itself while it lives, and the last it said: `status.json` and `failure.json` in its folder.

    status.json    once a second: where it is, which processes it has, who waits for whom and since when
    failure.json   once, when it ends by an error: the first cause, with the traceback of whichever process it came from

`tidemill why` reads both. Neither is needed to go on.
"""

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
    """Keep `status.json` up to date while the body runs. more: what else to say, as JSON data."""
    started = time.time()

    def write() -> None:
        processes = [asdict(handle.vitals()) for handle in handles()]
        about = {"pid": os.getpid(), "started": started, "at": time.time(), "processes": processes, "waits": _together()}
        with contextlib.suppress(OSError):  # a full disk is the ledger's to report
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
    """The first cause, for whoever asks later. Nothing here may hide the error itself."""
    with contextlib.suppress(OSError):
        about = {
            "at": time.time(),
            "pid": os.getpid(),
            "kind": type(error).__name__,
            "message": str(error) or (INTERRUPTED if isinstance(error, _INTERRUPTIONS) else ""),
            "trace": _trace(error),
        }
        write_json(folder / FAILURE, about)


def _trace(error: BaseException) -> str:
    """Its traceback and its causes', with the notes, which hold the tracebacks of other processes."""
    parts, each = list[str](), error
    while True:
        parts.insert(0, "".join(traceback.format_exception(each, chain=False)))
        if each.__cause__ is None or isinstance(each.__cause__, BaseExceptionGroup):  # a group says what else was cancelled
            return "\nwhich led to:\n\n".join(parts)
        each = each.__cause__


def forget_end(folder: Path) -> None:
    """What an earlier process said is nothing that the one which goes on says."""
    for name in (FAILURE, STATUS):
        (folder / name).unlink(missing_ok=True)


def _together() -> list[dict[str, Any]]:
    """Equal waits as one, with their number; the longest first."""
    groups: dict[tuple[str, str], list[Wait]] = {}
    for wait in open_waits():
        groups.setdefault((wait.peer, wait.what), []).append(wait)
    return [
        {"peer": peer, "what": what, "count": len(waits), "since": waits[0].since, "limit_s": waits[0].limit_s}
        for (peer, what), waits in groups.items()
    ]
