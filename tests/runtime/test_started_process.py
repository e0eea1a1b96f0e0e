"""The start of a process that is cancelled at any moment: it ends, and leaves nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import psutil
import pytest

from tidemill.core.bounded_await import undivided
from tidemill.runtime.started_process import started_process

PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
FOREVER = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


@pytest.mark.parametrize("turns", range(8))
async def test_a_start_that_is_cancelled_ends_and_leaves_no_process(turns: int) -> None:
    before = {each.pid for each in psutil.Process().children()}
    starting = asyncio.ensure_future(started_process(*FOREVER, **PIPES))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({starting})
    if not starting.cancelled():  # it had started
        starting.result().kill()
        await starting.result().wait()
    assert {each.pid for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE} <= before


async def test_what_the_process_has_started_by_then_is_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the pipes, for whose end asyncio waits."""
    create, children, begun = asyncio.create_subprocess_exec, list[psutil.Process](), asyncio.Event()

    async def created(*command: str, **how: Any) -> asyncio.subprocess.Process:
        process = await create(*command, **how)
        while not children:
            children.extend(psutil.Process(process.pid).children())
            await asyncio.sleep(0.005)
        begun.set()
        await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", created)
    parent = (sys.executable, "-S", "-c", f"import subprocess; subprocess.run({FOREVER!r})")
    starting = asyncio.ensure_future(started_process(*parent, **PIPES))
    async with asyncio.timeout(60):
        await begun.wait()
        starting.cancel()
        await asyncio.wait({starting})
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children):
            await asyncio.sleep(0.005)


async def test_a_second_cancellation_comes_at_once_and_what_was_begun_is_undone() -> None:
    go, undone = asyncio.Event(), list[int]()

    async def work() -> int:
        await go.wait()
        return 7

    async def undo(result: int) -> None:
        undone.append(result)

    waiting = asyncio.ensure_future(undivided(work(), undo))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.wait({waiting}, timeout=60)
    assert waiting.cancelled() and not undone
    go.set()
    async with asyncio.timeout(60):
        while not undone:
            await asyncio.sleep(0)
    assert undone == [7]


async def test_what_fails_is_raised() -> None:
    async def nothing(result: object) -> None:
        raise AssertionError("there is no result")

    with pytest.raises(FileNotFoundError):
        await started_process("/no/such/program")

    async def work() -> int:
        raise LookupError("no rule")

    with pytest.raises(LookupError, match="no rule"):
        await undivided(work(), nothing)
