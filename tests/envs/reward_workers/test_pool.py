"""A misbehaving reward function is an InfraError within its limit, never a score, and leaves nothing behind (I5, I4)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.types import InfraError, Score, Unscorable
from tidemill.envs.environment_settings import ScoringSettings
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.runtime.workers import child, stopped

FAULTY = str(Path(__file__).with_name("faulty_rewards.py"))
LIMIT_S = 0.4


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_gone(pids: list[int], within_s: float = 5.0) -> bool:
    """Poll: the kernel needs a moment between the signal and the end."""
    deadline = time.monotonic() + within_s
    while not all(gone(p) for p in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return all(gone(p) for p in pids)


@pytest.fixture
async def pool():
    pool = RewardPool(workers=1, limit_s=LIMIT_S)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield pool
    await pool.close()
    assert await until_gone([p.pid for p in psutil.Process().children(recursive=True) if p.pid not in before])


async def good(pool: RewardPool) -> None:
    """The pool goes on after whatever happened, and tells right from wrong."""
    assert await pool.call(f"{FAULTY}:good", ["a", "a"], limit_s=10) == Score(1.0)
    assert await pool.call(f"{FAULTY}:good", ["a", "b"], limit_s=10) == Score(0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="takes hold of a pipe through /proc")
def test_pipes_of_a_killed_worker_are_closed_whoever_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio closes them when it has read them to their end, which may be never, or in a loop that is closed by then."""
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: heard.append(told.exc_value))

    async def one_call() -> list[int]:
        pool = RewardPool(workers=1, limit_s=LIMIT_S)
        await good(pool)
        held = [os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY) for pid in pool.pool.pids for fd in (1, 2)]
        await pool.close()
        return held

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        held = asyncio.run(one_call())
        gc.collect()
    for fd in held:
        os.close(fd)
    assert len(held) == 2 and not heard


FAULTS = {
    "sleeps": "did not return within 0.4 s",
    "spins": "did not return within 0.4 s",
    "holds_the_interpreter": "did not return within 0.4 s",
    "exits": "exited with status 0",
    "sys_exits": "raised SystemExit",
    "raises": "raised KeyError: 'no such column'",
    "nan": "returned nan",
    "inf": "returned inf",
    "string": "returned '1.0' (str)",
    "long_string": "returned 'xxx",
    "segfaults": "was killed by SIGSEGV",
    "writes_everywhere": "",
    "absent": "has no 'absent'",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_an_infra_error_within_its_limit_and_the_pool_goes_on(pool, fault):
    await pool.start()
    limit_s = LIMIT_S if "did not return" in FAULTS[fault] else 10.0
    async with asyncio.timeout(120):  # the slowest of them would take ten minutes
        outcome = await pool.call(f"{FAULTY}:{fault}", ["text"], limit_s=limit_s, name=fault)
    assert isinstance(outcome, InfraError)
    assert FAULTS[fault] in outcome.reason
    assert len(outcome.reason) < 1000
    await good(pool)
    assert pool.counters()["scoring/errors"] == 1


async def test_none_is_unscorable_and_numbers_of_every_kind_are_scores(pool):
    assert isinstance(await pool.call(f"{FAULTY}:nothing", ["x"], limit_s=10), Unscorable)
    assert await pool.call("operator:eq", [1, 1], limit_s=10) == Score(1.0)  # a bool
    assert await pool.call("numpy:float32", [0.5], limit_s=10) == Score(0.5)


async def test_a_pool_that_stood_still_itself_blames_nobody(pool):
    await pool.start()
    await good(pool)
    call = asyncio.ensure_future(pool.call("time:sleep", [0.3], limit_s=1.0))
    await asyncio.sleep(0.1)
    time.sleep(3)  # the reply and the end of the time it has are found together
    assert isinstance(await call, Unscorable)
    assert pool.counters()["scoring/timeouts"] == 0


async def test_a_reply_of_any_size_is_not_taken(pool):
    outcome = await pool.call(f"{FAULTY}:too_much", ["x"], limit_s=10)
    assert isinstance(outcome, InfraError)
    assert "at most 1048576 are taken" in outcome.reason
    await good(pool)
    assert pool.counters()["scoring/starts"] == 1


async def test_prints_corrupt_nothing(pool):
    assert await pool.call(f"{FAULTY}:prints", ["x"], limit_s=10) == Score(0.5)
    await good(pool)


async def test_a_fork_that_returns_twice_answers_once(pool):
    assert await pool.call(f"{FAULTY}:forks_and_both_return", ["x"], limit_s=5) == Score(0.0)
    await good(pool)


@pytest.mark.parametrize("fault", ["forks_and_sleeps", "leaves_a_process", "leaves_the_group"])
async def test_processes_of_a_call_do_not_outlive_it(pool, fault, tmp_path):
    pids = tmp_path / "pids"
    outcome = await pool.call(f"{FAULTY}:{fault}", ["x", str(pids)], limit_s=1.5)
    assert isinstance(outcome, Score if fault == "leaves_a_process" else InfraError)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 1
    assert await until_gone(started)
    await good(pool)


async def test_a_death_is_seen_at_once_though_a_forked_child_lives_on(pool, tmp_path):
    pids = tmp_path / "pids"
    outcome = await asyncio.wait_for(pool.call(f"{FAULTY}:dies_with_a_child_left", ["x", str(pids)], limit_s=600), 20)
    assert isinstance(outcome, InfraError)
    assert "exited with status 3" in outcome.reason
    assert await until_gone([int(line) for line in pids.read_text().split()])
    await good(pool)


async def test_memory_is_limited_and_idle_threads_do_not_spin(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")  # as in a user's shell
    pool = RewardPool(workers=1, limit_s=20, memory_mb=4096)
    try:
        assert await pool.call(f"{FAULTY}:waits_passively", ["x"]) == Score(1.0)
        outcome = await pool.call(f"{FAULTY}:eats_memory", ["x"])
        assert isinstance(outcome, InfraError)
        assert "MemoryError" in outcome.reason
    finally:
        await pool.close()


async def test_a_group_is_judged_in_one_call(pool):
    columns = {"completions": ["a", "b", ""], "answer": ["a"] * 3}
    outcomes = await pool.call_group(f"{FAULTY}:group", 3, kwargs=columns)
    assert outcomes[:2] == [Score(1.0), Score(0.0)]
    assert isinstance(outcomes[2], Unscorable)
    assert pool.counters()["scoring/calls"] == 1
    short = await pool.call_group(f"{FAULTY}:group_short", 3, kwargs=columns)
    assert [type(o) for o in short] == [InfraError] * 3
    assert "1 values: expected a list of 3" in short[0].reason


async def test_workers_stay_warm_and_only_failures_replace_them(pool):
    first = [await pool.call(f"{FAULTY}:counts", ["x"]) for _ in range(3)]
    await pool.call(f"{FAULTY}:raises", ["x"])
    assert await pool.call(f"{FAULTY}:counts", ["x"]) == Score(4.0)
    assert [o.value for o in first] == [1, 2, 3]
    await pool.call(f"{FAULTY}:exits", ["x"])
    assert await pool.call(f"{FAULTY}:counts", ["x"]) == Score(1.0)
    assert pool.counters()["scoring/starts"] == 2
    assert pool.counters()["scoring/deaths"] == 1


async def test_the_limit_starts_with_the_work_not_with_the_import(pool, tmp_path):
    slow = tmp_path / "slow_to_import.py"
    slow.write_text(f"import time\ntime.sleep({2 * LIMIT_S})\ndef score(completion): return 1.0\n")
    assert await pool.call(f"{slow}:score", ["x"]) == Score(1.0)


async def test_an_import_that_never_ends_ends(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "STARTUP_LIMIT_S", 1.0)
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    outcome = await pool.call(f"{tmp_path}/stuck.py:score", ["x"])
    assert isinstance(outcome, InfraError)
    assert "did not start within 1 s" in outcome.reason


async def test_waiting_for_a_worker_does_not_use_up_the_limit(pool):
    slow, quick = await asyncio.gather(pool.call(f"{FAULTY}:sleeps", ["x"]), pool.call(f"{FAULTY}:good", ["a", "a"]))
    assert isinstance(slow, InfraError)
    assert quick == Score(1.0)


async def test_a_cancelled_call_kills_its_worker(pool):
    await pool.start()
    (worker,) = pool.pool.pids
    task = asyncio.ensure_future(pool.call(f"{FAULTY}:sleeps", ["x"], limit_s=60))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await until_gone([worker])
    await good(pool)


async def test_close_in_the_middle_of_a_call_ends_it():
    pool = RewardPool(workers=2, limit_s=60)
    await pool.start()
    pids = pool.pool.pids
    task = asyncio.ensure_future(pool.call(f"{FAULTY}:sleeps", ["x"]))
    await asyncio.sleep(0.1)
    await pool.close()
    assert isinstance(await task, InfraError)
    assert await until_gone(pids)


PARENT = f"""
import asyncio, sys
from tidemill.envs.reward_workers.reward_pool import RewardPool
async def main():
    pool = RewardPool(workers=1, limit_s=60)
    await pool.start()
    print(*pool.pool.pids, pool.pool._guard.pid, flush=True)
    await pool.call({FAULTY!r} + ":" + sys.argv[1], ["x", sys.argv[2]])
asyncio.run(main())
"""


@pytest.mark.parametrize("fault", ["forks_and_sleeps", "sleeps"])
async def test_nothing_outlives_a_killed_controller(fault, tmp_path):
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, fault, str(pids)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [int(pid) for pid in parent.stdout.readline().split()]
        deadline = time.monotonic() + 10
        while fault == "forks_and_sleeps" and not (pids.exists() and pids.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        os.kill(parent.pid, signal.SIGKILL)
    started += [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    assert len(started) == (3 if fault == "forks_and_sleeps" else 2)
    assert await until_gone(started)


async def test_in_process_for_debugging(capsys):
    pool = RewardPool(workers=0)
    assert await pool.call("os:getpid") == Score(os.getpid())
    assert isinstance(await pool.call(f"{FAULTY}:raises", ["x"]), InfraError)
    await pool.close()
    assert pool.counters()["scoring/starts"] == 0


def test_settings():
    assert RewardPool(**build(ScoringSettings, {}).workers_as()).limit_s == 10.0
    with pytest.raises(ConfigError, match="limit_s"):
        build(ScoringSettings, {"limit_s": 0})


async def test_a_worker_that_was_stopped_is_not_waited_for_and_its_call_is_done_by_another(pool, monkeypatch):
    """Nothing was wrong with the call: it is not the function's limit that ends the wait."""
    monkeypatch.setattr(stopped, "LOOK_S", 0.02)
    await good(pool)
    (worker,) = pool.pool.pids
    os.kill(worker, signal.SIGSTOP)
    assert await pool.call(f"{FAULTY}:good", ["a", "a"], limit_s=600) == Score(1.0)
    assert gone(worker) and pool.counters()["scoring/deaths"] == 1 and pool.counters()["scoring/timeouts"] == 0


async def test_a_function_that_stops_its_worker_is_an_infra_error(pool, monkeypatch):
    monkeypatch.setattr(stopped, "LOOK_S", 0.02)
    outcome = await asyncio.wait_for(pool.call(f"{FAULTY}:stops", ["x"], limit_s=600), 60)
    assert isinstance(outcome, InfraError) and "was stopped by a signal" in outcome.reason
    assert pool.counters()["scoring/deaths"] == 2, "it was asked of two"
    await good(pool)
