"""Reward pool: worker processes that call reward functions under a time limit.

A call always ends with an outcome, within the start-up time and the limit. A function that sleeps for ever, exits, crashes,
raises or returns something else than a number is an InfraError (I5). A worker that hung, died or was stopped is replaced;
after a stop by a signal the call is repeated once. The other workers stay warm: imports and caches are there for the next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.core.errors import CallFailed, NoWorkers, WorkerLost
from tidemill.core.outcomes import clip
from tidemill.core.types import InfraError, Outcome, Score
from tidemill.core.user_code import TOLD, raised
from tidemill.envs.reward_workers.reward_worker import MAX_REPLY, Outcomes, RewardRequest, invoke
from tidemill.runtime.workers.worker import WorkerKind
from tidemill.runtime.workers.worker_pool import WorkerPool

_MODULE = "tidemill.envs.reward_workers.reward_worker"
_COUNTERS = ("calls", "scores", "unscorable", "errors", "timeouts", "deaths", "seconds")


class RewardPool:
    """Pool of reward workers, with counters of calls and failures."""

    def __init__(self, workers: int = 2, limit_s: float = 10.0, memory_mb: int = 0) -> None:
        """workers: number of processes (0 runs calls in this one, without a limit). memory_mb: 0 is unlimited."""
        if workers < 0 or limit_s <= 0 or memory_mb < 0:
            raise ValueError(f"{workers=}, {limit_s=}, {memory_mb=}: expected workers >= 0, limit_s > 0, memory_mb >= 0")
        self.workers, self.limit_s = workers, limit_s
        kind = WorkerKind(_MODULE, "the scoring worker", Outcomes, memory_mb=memory_mb, most=MAX_REPLY)
        self.pool = WorkerPool(kind, workers)
        self._counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = None,
        name: str = "",
    ) -> Outcome:
        """Call FILE.py:NAME or MODULE:NAME with plain data for one attempt. Failures are InfraError, not raised."""
        return (await self._call(RewardRequest(function, name or function, list(args), dict(kwargs or {})), limit_s))[0]

    async def call_group(self, function: str, count: int, *, kwargs: Mapping[str, Any], name: str = "") -> list[Outcome]:
        """Call a function that returns `count` values; if the call fails, all are InfraError."""
        return await self._call(RewardRequest(function, name or function, [], dict(kwargs), count), None)

    def counters(self) -> dict[str, float]:
        """Totals so far: calls, scores, unscorable, errors, timeouts, deaths, starts, seconds."""
        return {f"scoring/{name}": value for name, value in (*self._counters.items(), ("starts", float(self.pool.starts)))}

    async def start(self) -> None:
        await self.pool.start()

    async def close(self) -> None:
        """Kill all workers, also in the middle of calls, and wait until they are gone."""
        await self.pool.close()

    async def _call(self, request: RewardRequest, limit_s: float | None) -> list[Outcome]:
        begun = time.monotonic()
        outcomes = await self._in_worker(request, limit_s or self.limit_s) if self.workers else _here(request)
        self._counters["calls"] += 1
        self._counters["seconds"] += time.monotonic() - begun
        for outcome in outcomes:
            kind = "scores" if isinstance(outcome, Score) else "errors" if isinstance(outcome, InfraError) else "unscorable"
            self._counters[kind] += 1
        return outcomes

    async def _in_worker(self, request: RewardRequest, limit_s: float) -> list[Outcome]:
        for is_last in (False, True):
            try:
                outcomes = await self.pool.call(request, request.name, loads=request.function, limit_s=limit_s)
                if len(outcomes) == max(1, request.count):
                    return outcomes
                return _failed(request, f"the scoring worker of {request.name} gave {len(outcomes)} outcomes")
            except CallFailed as failed:
                return _failed(request, f"{request.name} raised {failed}" if failed.began else f"{request.name}: {failed}")
            except NoWorkers as closed:
                return _failed(request, str(closed))
            except WorkerLost as lost:
                self._counters["timeouts"] += lost.kind == "timeout"
                self._counters["deaths"] += lost.kind in ("died", "stopped")
                if lost.kind != "stopped" or is_last:  # the call is rarely the cause of a stop, so it is repeated
                    return _failed(request, str(lost))
        raise AssertionError("the last one returns")


def _here(request: RewardRequest) -> list[Outcome]:
    """The outcomes of a call in this process."""
    try:
        return invoke(request)
    except (Exception, SystemExit) as error:
        return _failed(request, f"{request.name} raised {raised(error)}")


def _failed(request: RewardRequest, reason: str) -> list[Outcome]:
    return [InfraError(clip(reason, TOLD))] * max(1, request.count)
