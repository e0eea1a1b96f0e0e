"""Processes: death is noticed at once and by name, and nothing is ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from echo_worker import Start

from tidemill.core.errors import ConfigError, PeerDied, PeerTimeout, RemoteError, StartFailed
from tidemill.runtime.placement import Liveness
from tidemill.runtime.process_logs import Log
from tidemill.runtime.workers import stopped


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not running(pid)


async def test_killed_child_fails_pending_calls_at_once(start: Start) -> None:
    child = await start()
    calls = [asyncio.create_task(child.proxy.hold(str(i))) for i in range(3)]
    while len(await child.proxy.held()) < 3:
        pass
    os.kill(child.pid, signal.SIGKILL)
    began = time.monotonic()
    for call in calls:
        with pytest.raises(
            PeerDied, match=r"engine-0 died: killed by SIGKILL; its log: .*engine-0.log\n.*printed to stdout"
        ):
            await call
    assert time.monotonic() - began < 10
    with pytest.raises(PeerDied, match="SIGKILL"):
        await child.proxy.pid()
    assert not child.alive
    assert (await child.wait()).startswith("died: killed by SIGKILL")
    assert "SIGKILL" in await child.stop()


async def test_child_that_exits_by_itself_is_noticed(start: Start) -> None:
    child = await start()
    call = asyncio.create_task(child.proxy.hold("x"))
    while not await child.proxy.held():
        pass
    os.kill(child.pid, signal.SIGTERM)
    with pytest.raises((PeerDied, RemoteError)):
        await call
    assert "exit status 0" in await child.wait()
    await child.stop()


@pytest.mark.parametrize("when", ["idle", "blocked", "stopped", "server-stopped", "polled"])
async def test_children_and_their_server_die_with_a_killed_parent(tmp_path: Path, temporary: Path, when: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "parent.py"), str(tmp_path), when], stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        assert parent.stdout is not None
        pids = [int(each) for each in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(running, pids))
        parent.kill()
        parent.wait(10)
        assert all(gone_within(pid, 5) for pid in pids)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()  # type: ignore[union-attr]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_sigstopped_child_times_out_and_is_killed(start: Start) -> None:
    child = await start(deadlines={"pid": 0.2})
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(PeerTimeout, match=r"^engine-0 did not answer pid\(\) within 0.2 s$"):
        await child.proxy.pid()
    assert "killed" in await child.stop(deadline=0.4)
    assert gone_within(child.pid, 1)


async def test_a_deadline_cancels_the_remote_task(start: Start) -> None:
    child = await start(deadlines={"hold": 0.1})
    with pytest.raises(PeerTimeout) as caught:
        await child.proxy.hold("x")
    assert (caught.value.peer, caught.value.method, caught.value.seconds) == ("engine-0", "hold", 0.1)
    async with asyncio.timeout(10):
        while await child.proxy.cancelled() != ["x"]:
            pass
    await child.stop()


async def test_a_remote_timeout_is_not_taken_for_our_own(start: Start) -> None:
    child = await start()
    with pytest.raises(TimeoutError, match="verifier") as caught:
        await child.proxy.fail("timeout")
    assert not isinstance(caught.value, PeerTimeout)
    assert "echo_worker.py" in caught.value.__notes__[0]
    with pytest.raises(RemoteError, match=r"engine-0 raised ZeroDivisionError: by zero\n(.|\n)*echo_worker.py"):
        await child.proxy.fail("other")
    with pytest.raises(ValueError, match="expected"):
        await child.proxy.wrong()
    await child.stop()


async def test_stop_says_when_close_failed_and_still_ends_it(start: Start) -> None:
    child = await start({"close": "fails"})
    assert "cannot close" in await child.stop(deadline=20)
    assert gone_within(child.pid, 1)


async def test_a_child_that_was_closed_is_not_taken_apart_and_has_printed_everything(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write to, and so copy, what it shares with the process it was forked from."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    child = await start({"start": "leaves"})
    await child.stop(deadline=20)
    assert gone_within(child.pid, 1)
    said = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "not flushed by itself" in said and "taken apart" not in said


async def test_stop_cancelled_half_way_still_reaps(start: Start) -> None:
    child = await start({"close": "hangs"})
    stopping = asyncio.create_task(child.stop(deadline=60))
    await child.proxy.pid()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert gone_within(child.pid, 1)


async def test_stop_takes_what_the_child_started_along(tmp_path: Path, start: Start) -> None:
    child = await start({"start": "grandchild", "mark": str(tmp_path), "close": "hangs"})
    grandchild = psutil.Process(child.pid).children()[0].pid
    await child.stop(deadline=0.4)
    assert gone_within(grandchild, 2)


def grandchildren() -> set[psutil.Process]:
    return {child for server in psutil.Process().children() for child in server.children()}


async def test_start_failures(start: Start) -> None:
    before = grandchildren()  # of the process that runs tests, such as sandboxes that others keep
    with pytest.raises(StartFailed, match=r"engine-0 did not start: killed by SIGKILL(.|\n)*about to go"):
        await start({"start": "killed"})
    with pytest.raises(StartFailed, match="killed by SIGKILL"):  # though its fork still holds the pipe
        await start({"start": "forks and is killed"})
    with pytest.raises(PeerTimeout, match=r"engine-0 did not answer start\(\) within 0.5 s"):
        await start({"start": "hangs"}, start_deadline=0.5)
    with pytest.raises(ConfigError, match=r"^engine-0 did not start: model='nope'"):
        await start({"start": "value"})
    with pytest.raises(ValueError, match="name a file"):
        await start(name="../x")
    with pytest.raises(StartFailed, match=r"engine-0 did not start: the fork server could not be started: .*No such file"):
        await start(command=["/no/such/program"])
    async with asyncio.timeout(20):  # what has ended is reaped when its server is told to, after the caller has heard of it
        while grandchildren() - before:
            await asyncio.sleep(0.005)


async def test_a_child_that_forks_starts_all_the_same(start: Start) -> None:
    child = await start({"start": "forks", "close": "hangs"}, start_deadline=30)
    fork = psutil.Process(child.pid).children()[0].pid
    await child.stop(deadline=0.4)
    assert gone_within(fork, 2)


async def test_the_launch_is_private(temporary: Path, start: Start) -> None:
    await (await start()).stop()  # asyncio keeps a descriptor of its own
    before = len(os.listdir("/dev/fd"))
    child = await start({"secret": "s3cret"}, threads=3)
    assert list(temporary.iterdir()) == []  # connected, and the socket's folder is gone already
    process = psutil.Process(child.pid)
    assert "s3cret" not in " ".join([*process.cmdline(), *process.environ().values()])
    assert os.getsid(child.pid) == child.pid  # Ctrl-C does not reach it
    assert await child.proxy.environment("OMP_NUM_THREADS") == "3" and await child.proxy.threads() == 3
    assert await child.proxy.pid() == child.pid
    await child.stop()
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(
    ("given", "device", "seen"),
    [
        (None, "", ""),
        (None, "cuda:3", "3"),
        ("4, 7,GPU-1f", "cuda:1", "7"),
        ("4,GPU-1f", "cuda:1", "GPU-1f"),
        ("4,7", "", "4,7"),
    ],
)
async def test_a_role_sees_the_device_it_was_given(
    start: Start, monkeypatch: pytest.MonkeyPatch, given: str | None, device: str, seen: str
) -> None:
    """By the numbers of this process, which may itself see only some."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    child = await start(device=device)
    assert (await child.proxy.environment("CUDA_VISIBLE_DEVICES") or "") == seen


async def test_large_arrays_travel(start: Start) -> None:
    child = await start()
    array = np.random.default_rng(0).random(2_000_000)
    assert np.array_equal(await child.proxy.echo(array), array)
    await child.stop()


def test_tail_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = Log.at(path)
    path.write_text("\n".join(f"line {i} {'x' * 50}" for i in range(10_000)))
    assert len(log.tail()) < 6000
    assert "line 9999" in log.tail()
    assert Log.at(path).tail() == f"its log: {path} (empty)"  # what an earlier process wrote is not this one's
    with open(path, "a") as file:
        file.write("\nthe last words")
    assert Log(path, path.stat().st_size - 14).tail() == f"its log: {path}\n  | the last words"


QUICK = Liveness(every_s=0.02, silent_s=0.5, stuck_s=0.5)


async def test_a_frozen_child_is_killed_and_named(start: Start) -> None:
    child = await start(liveness=QUICK)
    call = asyncio.create_task(child.proxy.hold("x"))
    while not await child.proxy.held():
        pass
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(PeerDied, match=r"engine-0 was silent for 0.5 s \(its state is 'stopped'\) and was killed"):
        await call
    assert not running(child.pid)
    await child.stop()


PATIENT = Liveness(every_s=0.02, silent_s=600, stuck_s=600)


async def test_a_stopped_child_is_not_waited_for_as_a_slow_one_is(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "LOOK_S", 0.02)
    child = await start(liveness=PATIENT)
    os.kill(child.pid, signal.SIGSTOP)
    assert (await child.wait()).startswith("was stopped by a signal for 0.12 s and was killed")
    assert not running(child.pid)
    await child.stop()


@pytest.mark.parametrize("why", ["it ran in between", "the looks were late"])
async def test_a_child_that_is_stopped_for_moments_lives(start: Start, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Starved by a signal time and again; or stopped with us, by somebody who lets everything go on after a while."""
    monkeypatch.setattr(stopped, "LOOK_S", 0.02)
    real, looks, enough = stopped.stopped_at, [0], asyncio.Event()

    def look(pid: int) -> object:
        seen = real(pid)
        if seen is not None:  # it has been stopped
            looks[0] += 1
            if looks[0] == 4 * stopped.LOOKS:
                enough.set()
            if looks[0] % (stopped.LOOKS - 1) == 0:
                if why == "it ran in between":
                    return None
                time.sleep(3 * stopped.LOOK_S)  # the next one is late
        return seen

    monkeypatch.setattr(stopped, "stopped_at", look)
    child = await start(liveness=PATIENT)
    os.kill(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        await enough.wait()
    assert child.alive
    os.kill(child.pid, signal.SIGCONT)
    await child.proxy.pid()
    await child.stop()


def test_a_stopped_process_that_has_run_is_told_from_one_that_has_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert stopped.stopped_at(process.pid) is None
        before = come_to_a_stop(process.pid)
        assert stopped.stopped_at(process.pid) == before
        os.kill(process.pid, signal.SIGCONT)
        assert come_to_a_stop(process.pid) != before
    finally:
        process.kill()
        process.wait(10)
    assert stopped.stopped_at(process.pid) is None


def come_to_a_stop(pid: int) -> object:
    """What is seen of it, once it has come to a stop."""
    os.kill(pid, signal.SIGSTOP)
    before, end = None, time.monotonic() + 10
    while ((seen := stopped.stopped_at(pid)) is None or seen != before) and time.monotonic() < end:
        before = seen
    return seen


async def test_a_stuck_child_is_killed_with_its_stacks_in_the_log(tmp_path: Path, start: Start) -> None:
    """Its event loop answers heartbeats, but the one call it has makes no progress."""
    child = await start(liveness=QUICK)
    with pytest.raises(PeerDied, match=r"made no progress for 0.5 s in hold\(\) and was killed"):
        await child.proxy.hold("x")
    assert "Current thread" in (tmp_path / "logs" / "engine-0.log").read_text()
    await child.stop()


async def test_a_slow_child_that_makes_progress_lives(start: Start) -> None:
    child = await start(liveness=Liveness(every_s=0.02, silent_s=5, stuck_s=0.2))
    slow = asyncio.create_task(child.proxy.hold("x"))
    end = time.monotonic() + 0.8  # four times as long as it may be stuck
    while time.monotonic() < end:
        await child.proxy.pid()  # other calls are progress
    assert not slow.done()
    vitals = child.vitals()
    assert vitals.alive and vitals.heard < 5 and vitals.progress > 0 and vitals.busy[0][0] == "hold"
    await child.proxy.release("x")
    await slow
    await child.stop()


async def test_a_watcher_that_was_stopped_itself_kills_nobody(start: Start) -> None:
    child = await start(liveness=Liveness(every_s=0.1, silent_s=2, stuck_s=2))
    blocked = asyncio.create_task(child.proxy.block(4.4))  # as if both had been stopped, with a heartbeat under way,
    await asyncio.sleep(0.2)
    time.sleep(3.5)  # and this process were the first to go on
    await blocked
    await child.proxy.pid()
    assert child.alive
    await child.stop()
