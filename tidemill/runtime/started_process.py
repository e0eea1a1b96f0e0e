"""Start of a process in this event loop, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from tidemill.core.bounded_await import undivided

KILL_S = 5.0  # for a killed process to be gone


async def started_process(*command: str, **how: Any) -> asyncio.subprocess.Process:
    """Start a process group, as `asyncio.create_subprocess_exec` does with these options.

    That waits for ever when it is cancelled before its pipes are open. Here, a caller that is cancelled waits until the
    process has started, and its group is killed.
    """
    return await undivided(asyncio.create_subprocess_exec(*command, start_new_session=True, **how), _killed)


def kill_group(pid: int) -> None:
    """Kill the process group that a process leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _killed(process: asyncio.subprocess.Process) -> None:
    kill_group(process.pid)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_S)
    process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
