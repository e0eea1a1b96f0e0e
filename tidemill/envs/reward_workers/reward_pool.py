"""Scoring stage: a pool of worker processes that call reward functions under a time limit.

    call -> idle worker (started when first needed) -> RewardRequest -> Started (the limit begins) -> RewardReply -> outcome

A call always ends with an outcome, within the start-up time and the limit. A function that sleeps for ever, exits, crashes,
raises or returns something else than a number is an InfraError (I5). A worker that hung, died or was stopped is replaced;
after a stop by a signal the call is repeated once, in another worker. All other workers stay warm: imports and caches of a
function are there for the next call.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.core.types import InfraError, Outcome, Score
from tidemill.envs.reward_workers.invoke import failed, invoke
from tidemill.envs.reward_workers.reward_process import RewardWorker, WorkerFailed
from tidemill.envs.reward_workers.reward_protocol import RewardReply, RewardRequest
from tidemill.runtime.workers.child import REAP_LIMIT_S
from tidemill.runtime.workers.guard_client import Guard

_COUNTERS = ("calls", "scores", "unscorable", "errors", "timeouts", "deaths", "starts", "seconds")


class WorkerPool:
    """Pool of scoring workers, with counters of calls and failures."""

    def __init__(self, workers: int = 2, limit_s: float = 10.0, memory_mb: int = 0) -> None:
        """workers: number of processes (0 runs calls in this one, without a limit). memory_mb: 0 is unlimited."""
        if workers < 0 or limit_s <= 0 or memory_mb < 0:
            raise ValueError(f"{workers=}, {limit_s=}, {memory_mb=}: expected workers >= 0, limit_s > 0, memory_mb >= 0")
        self.workers, self.limit_s, self.memory_mb = workers, limit_s, memory_mb
        self._free = asyncio.Semaphore(max(1, workers))  # bounded: a call has its start-up and its limit
        self._idle: list[RewardWorker] = []  # the most recently used is last and taken first: its caches are warm
        self._all: dict[int, RewardWorker] = {}
        self._killed: set[asyncio.Task[None]] = set()
        self._guard = Guard()
        self._ids = itertools.count()
        self._counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._closed = False

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = None,
        name: str = "",
    ) -> Outcome:
        """Call `function` (FILE.py:NAME or MODULE:NAME) for one attempt; returns its outcome.

        Arguments are plain JSON data. Failures are InfraError, never exceptions.
        """
        return (await self._call(function, args, kwargs, 0, limit_s, name))[0]

    async def call_group(
        self,
        function: str,
        count: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = None,
        name: str = "",
    ) -> list[Outcome]:
        """Call a function that returns `count` values; if the call fails, all are InfraError."""
        return await self._call(function, args, kwargs, count, limit_s, name)

    def counters(self) -> dict[str, float]:
        """Totals so far: calls, scores, unscorable, errors, timeouts, deaths, starts, seconds."""
        return {f"scoring/{name}": value for name, value in self._counters.items()}

    async def start(self) -> None:
        """Start every worker now instead of at the first calls."""
        self._idle += await asyncio.gather(*(self._start_worker() for _ in range(self.workers - len(self._all))))

    async def close(self) -> None:
        """Kill all workers, also in the middle of calls, and wait until they are gone."""
        self._closed = True
        self._idle.clear()
        for worker in list(self._all.values()):
            self._retire(worker)
        if self._killed:
            await asyncio.wait(self._killed, timeout=2 * REAP_LIMIT_S)
        await self._guard.close()

    async def _call(
        self,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        count: int,
        limit_s: float | None,
        name: str,
    ) -> list[Outcome]:
        request = RewardRequest(next(self._ids), function, name or function, list(args), dict(kwargs or {}), count)
        begun = time.monotonic()
        async with self._free:
            if self.workers:
                outcomes = await self._in_worker(request, limit_s or self.limit_s)
            else:
                outcomes = invoke(request)
        self._counters["calls"] += 1
        self._counters["seconds"] += time.monotonic() - begun
        for outcome in outcomes:
            kind = "scores" if isinstance(outcome, Score) else "errors" if isinstance(outcome, InfraError) else "unscorable"
            self._counters[kind] += 1
        return outcomes

    async def _in_worker(self, request: RewardRequest, limit_s: float) -> list[Outcome]:
        for is_last in (False, True):
            try:
                return list((await self._exchange(request, limit_s)).outcomes)
            except WorkerFailed as failure:
                self._counters["timeouts"] += failure.kind == "timeout"
                self._counters["deaths"] += failure.kind in ("died", "stopped")
                if failure.kind != "stopped" or is_last:  # the call is rarely the cause of a stop, so it is repeated
                    return failed(request, str(failure))
        raise AssertionError("the last one returns")

    async def _exchange(self, request: RewardRequest, limit_s: float) -> RewardReply:
        """Have one worker answer the request. Raises WorkerFailed."""
        assert not self._closed, "the pool is closed"
        worker = self._idle.pop() if self._idle else await self._start_worker()
        keep = False
        try:
            done = await worker.exchange(request, limit_s)
            keep = not done.children  # processes that a call left behind end with its worker
            return done
        finally:  # cancelled calls too: nobody would read their reply
            if keep and not self._closed:
                self._idle.append(worker)
            else:
                self._retire(worker)

    async def _start_worker(self) -> RewardWorker:
        await self._guard.start()
        worker = await RewardWorker.start("tidemill.envs.reward_workers.reward_worker", "the scoring worker", self.memory_mb)
        self._all[worker.pid] = worker
        self._guard.add(worker.pid)
        self._counters["starts"] += 1
        return worker

    def _retire(self, worker: RewardWorker) -> None:
        if self._all.pop(worker.pid, None) is None:
            return
        worker.kill()
        task = asyncio.ensure_future(self._reap(worker))
        self._killed.add(task)
        task.add_done_callback(self._killed.discard)

    async def _reap(self, worker: RewardWorker) -> None:
        await worker.reap()
        worker.kill()  # again, for processes forked while the first signal was on its way
        self._guard.discard(worker.pid)
