"""Sandboxes that are killed, stopped, slow or lying: see the table in `reliability/test_fault_table.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from tidemill.core import bounded_await
from tidemill.core.episode_counts import counting
from tidemill.core.errors import SandboxFailed
from tidemill.core.types import InfraError, Score
from tidemill.envs.code_checks.kept_sandboxes import kept_sandboxes
from tidemill.envs.rewards import code
from tidemill.sandbox import supervisor_process
from tidemill.sandbox.execution import LENGTH, MOST_HEADER, SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings

P = SandboxedProgram
WAITS = P("import time; print('begun', flush=True); time.sleep(600)")
WELL = P("print(1)")


def supervisor_of(sandbox: Sandbox) -> psutil.Process:
    """The supervisor that waits: the innermost of the processes that were started for it."""
    (pid,) = sandbox.processes
    process = psutil.Process(pid)
    while below := process.children():
        (process,) = below
    return process


async def running(sandbox: Sandbox) -> tuple[psutil.Process, asyncio.Task[Any]]:
    """A supervisor whose program has begun, and the call that waits for it."""
    supervisor = supervisor_of(sandbox)
    call = asyncio.ensure_future(sandbox.run(WAITS))
    async with asyncio.timeout(60):
        while not supervisor.children():
            await asyncio.sleep(0.005)
    return supervisor, call


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(60):
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_supervisor_that_is_killed_or_stopped_beside_its_program(
    level: str, sign: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()
    settings = SandboxSettings(level=level, warm=1, at_once=1, seconds=600.0)
    with counting(counts.update):
        async with Sandbox(settings) as sandbox:
            supervisor, call = await running(sandbox)
            below = supervisor.children(recursive=True)
            assert below and all(each.is_running() for each in below)
            if sign is signal.SIGSTOP:  # its time is over at the next call, and it does not end by itself
                monkeypatch.setattr(supervisor_process, "END_S", 0.2)
                os.kill(supervisor.pid, sign)
                async with asyncio.timeout(60):
                    while supervisor.status() != psutil.STATUS_STOPPED:
                        await asyncio.sleep(0.005)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                os.kill(supervisor.pid, sign)
                with pytest.raises(SandboxFailed, match=f"the sandbox \\({level}\\) ended"):
                    await call
            await gone([supervisor, *below])
            monkeypatch.undo()
            assert (await sandbox.run(WELL)).stdout == b"1\n", "the next one runs"
    assert counts == {"sandbox/runs": 2} | ({"sandbox/failed": 1} if sign is signal.SIGKILL else {})


async def test_a_stopped_supervisor_is_no_result(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_process, "GRACE_S", 0.3)
    monkeypatch.setattr(supervisor_process, "END_S", 0.2)
    async with Sandbox(SandboxSettings(level=level, warm=1, at_once=1, seconds=0.2)) as sandbox:
        supervisor = supervisor_of(sandbox)
        os.kill(supervisor.pid, signal.SIGSTOP)
        with pytest.raises(SandboxFailed, match=r"did not answer within 0.5 s"):
            await sandbox.run(WELL)
        await gone([supervisor])


async def test_a_supervisor_that_takes_too_long_to_start_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    go, counts, create = asyncio.Event(), Counter[str](), asyncio.create_subprocess_exec

    async def slow(*command: Any, **how: Any) -> asyncio.subprocess.Process:
        await go.wait()
        return await create(*command, **how)

    async with Sandbox(SandboxSettings(level="limits", warm=0)) as sandbox:
        with monkeypatch.context() as patched, counting(counts.update):
            patched.setattr(asyncio, "create_subprocess_exec", slow)
            patched.setattr(bounded_await, "SHORT_S", 0.05)
            with pytest.raises(SandboxFailed, match=r"the sandbox \(limits\) did not start: no result within 0.05 s"):
                await sandbox.run(WELL)
        assert (await sandbox.run(WELL)).stdout == b"1\n", "the next one runs"
    assert counts == {"sandbox/runs": 1, "sandbox/failed": 1}


async def test_a_slow_program_is_ended_and_counted(level: str) -> None:
    counts = Counter[str]()
    with counting(counts.update):
        async with Sandbox(SandboxSettings(level=level, seconds=0.3, warm=0)) as sandbox:
            assert (await sandbox.run(WAITS)).limit == "seconds"
    assert counts == {"sandbox/runs": 1, "sandbox/limits": 1}


def frame(header: Any, *blobs: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"".join([LENGTH.pack(len(text)), text, *blobs])


RESULT = {"status": 0, "limit": "", "seconds": 0.1, "peak": 1, "clean": True, "unconfined": ""}
LIES = {
    "wrong type": (frame(b"<html>1</html>"), "ended"),
    "no object": (frame([1, 2]), "ended"),
    "half a header": (frame({**RESULT, "blobs": [0, 0]})[:-9], "ended"),
    "half a result": (frame({**RESULT, "blobs": [9, 0]}, b"1\n"), "ended"),
    "a huge header": (LENGTH.pack(MOST_HEADER + 1) + b" " * 100, "sent a header of 65537 bytes"),
    "a huge result": (frame({**RESULT, "blobs": [1 << 40, 0]}), "more than its limit"),
    "ten thousand results": (frame({**RESULT, "blobs": [0] * 10_000}), "more than its limit"),
    "no status": (frame({"blobs": [0, 0], "limit": "", "seconds": 1, "peak": 1}), "no result that can be read"),
    "a status that is none": (frame({**RESULT, "status": "fine", "blobs": [0, 0]}), "no result that can be read"),
    "a program without a sandbox": (frame({**RESULT, "unconfined": "it was killed", "blobs": [0, 0]}), "it was killed"),
    "one output": (frame({**RESULT, "blobs": [0]}), "no result that can be read"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_supervisor_is_no_result(lie: str) -> None:
    raw, said = LIES[lie]
    counts = Counter[str]()
    with counting(counts.update):
        async with Sandbox(SandboxSettings(level="limits", warm=1, at_once=1)) as sandbox:
            (supervisor,) = sandbox._ready
            supervisor._stdout, supervisor._stderr = asyncio.StreamReader(), asyncio.StreamReader()
            supervisor._stdout.feed_data(raw)
            supervisor._stdout.feed_eof()
            supervisor._stderr.feed_eof()
            with pytest.raises(SandboxFailed, match=said):
                await sandbox.run(WELL)
            assert (await sandbox.run(WELL)).stdout == b"1\n"
    assert counts == {"sandbox/runs": 2, "sandbox/failed": 1}


async def test_ten_thousand_cases_end_at_the_budget(level: str) -> None:
    """Those that have not begun have failed: the score is of what was asked, and not of what was done."""
    cases = [{"stdin": "3", "stdout": "9"}] * 10_000
    given = {"cases": cases, "partial": True, "sandbox": level, "budget_s": 0.5}
    begin = time.monotonic()
    outcome = await asyncio.to_thread(code.score, "print(int(input()) ** 2)", **given)
    assert isinstance(outcome, Score) and 0 < outcome.value < 1
    assert (outcome.value * 10_000) == pytest.approx(round(outcome.value * 10_000)) and time.monotonic() - begin < 60


async def test_a_killed_sandbox_scores_nothing(level: str) -> None:
    """The reward whose sandbox is killed between two programs, and the one after it."""
    given: dict[str, Any] = {"cases": [{"stdin": "3", "stdout": "9"}], "budget_s": 60.0}
    given["sandbox"] = {"level": level, "warm": 1}
    assert await asyncio.to_thread(code.score, "print(9)", **given) == Score(1.0)
    kept = next(each for settings, each in kept_sandboxes()._open.items() if settings.level == level and settings.warm == 1)
    async with asyncio.timeout(60):
        while not kept.processes:
            await asyncio.sleep(0.005)
    for pid in kept.processes:
        os.kill(pid, signal.SIGKILL)
    outcome = await asyncio.to_thread(code.score, "print(9)", **given)
    assert isinstance(outcome, InfraError) and f"the sandbox ({level}) ended" in outcome.reason
