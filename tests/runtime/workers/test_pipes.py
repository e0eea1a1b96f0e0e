"""Pipes of processes that are gone."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidemill.runtime.workers.child import WorkerProcess
from tidemill.runtime.workers.worker_pool import Guard


@contextmanager
def nothing_told() -> Iterator[None]:
    told = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    yield
    gc.collect()  # a future tells of an exception that nobody asked for when it is collected
    assert not told


async def test_what_a_killed_worker_did_not_read_is_told_by_nobody():
    with nothing_told():
        child = await WorkerProcess.start("tidemill.envs.reward_workers.reward_worker", "a worker", memory_mb=4096)
        os.kill(child.pid, signal.SIGSTOP)
        child.post(bytes(1 << 20))  # more than a pipe takes
        child.kill()
        await child.reap()
        del child


async def test_what_a_killed_guard_did_not_read_is_told_by_nobody():
    with nothing_told():
        guard = Guard()
        await guard.start()
        assert guard.pid is not None
        os.kill(guard.pid, signal.SIGSTOP)
        for _ in range(20_000):
            guard.tell("-", 1_000_000)  # more than a pipe takes
        os.kill(guard.pid, signal.SIGKILL)
        await guard.close()
