"""Whatever a worker started ends with it, however it was started and however the worker, or who started it, ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidemill.runtime.workers import child as children
from tidemill.runtime.workers.child import WorkerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is promised on Linux alone")


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not any(map(lives, pids))


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


async def started() -> tuple[WorkerProcess, dict[str, Any], list[int]]:
    """A worker, what it says of itself, and its programs, its keepers and itself, all of which live."""
    child = await WorkerProcess.start("leaves_programs", "the worker", 0)
    told = json.loads(await child.receive(1000))
    pids = [*told["programs"], told["worker"], told["inner"], told["outer"]]
    assert child.pid == told["worker"] and all(map(lives, pids))
    return child, told, pids


async def test_a_worker_that_is_killed() -> None:
    child, _, pids = await started()
    child.kill()
    await child.reap()
    assert not any(map(lives, pids)), "it is waited for"


async def test_a_worker_that_ends_by_itself() -> None:
    child, told, pids = await started()
    child.post(b"exit")
    assert await child.epitaph() == "the worker exited with status 3"
    assert not any(map(lives, told["programs"])), "its status comes when all of it is gone"
    await child.reap()
    assert not any(map(lives, pids))


async def test_code_that_kills_its_parent() -> None:
    child, _, pids = await started()
    child.post(b"kill")
    assert await child.epitaph() == "the worker was killed by SIGKILL"
    await child.reap()
    assert not any(map(lives, pids))


@pytest.mark.parametrize("who", ["outer", "inner"])
async def test_a_keeper_that_is_killed(who: str) -> None:
    child, told, pids = await started()
    os.kill(told[who], signal.SIGKILL)
    assert await until_gone(pids)
    await child.reap()


async def test_keepers_that_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "REAP_LIMIT_S", 0.3)
    child, told, pids = await started()
    for who in ("outer", "inner"):
        os.kill(told[who], signal.SIGSTOP)
    child.kill()
    await child.reap()
    assert await until_gone(pids)


CONTROLLER = """
import asyncio, sys
from tidemill.runtime.workers.child import WorkerProcess
from tidemill.runtime.workers.worker_pool import Guard
async def main():
    guard = Guard()
    await guard.start()
    child = await WorkerProcess.start("leaves_programs", "the worker", 0)
    guard.tell("+", child.pid)
    print((await child.receive(1000)).decode()[:-1] + f', "guard": {guard.pid}}}', flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("first", [(), ("guard",), ("outer",), ("inner",), ("stop",)], ids=str)
async def test_nothing_outlives_who_started_the_worker(first: tuple[str, ...]) -> None:
    """Also where the guard or a keeper was killed before, or the keepers were stopped."""
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        told = json.loads(controller.stdout.readline())
        pids = [*told["programs"], told["worker"], told["inner"], told["outer"], told["guard"]]
        assert all(map(lives, pids))
        for who in first:
            for each in ("outer", "inner") if who == "stop" else (who,):
                os.kill(told[each], signal.SIGSTOP if who == "stop" else signal.SIGKILL)
        os.kill(controller.pid, signal.SIGKILL)
    assert await until_gone(pids)


async def test_what_carries_the_mark_ends_without_keepers_too() -> None:
    """Both were killed at once. What else they would have found is not promised then."""
    child, told, _ = await started()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("outer", "inner"):
            os.kill(told[who], number)
    await child.reap()
    plain, apart, daemon, deaf = told["programs"]
    assert await until_gone([plain, deaf, told["worker"]])
    for pid in filter(lives, (apart, daemon)):
        os.kill(pid, signal.SIGKILL)
