"""Pool's side of one scoring worker: one request and reply at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from tidemill.core import serialization
from tidemill.core.errors import CodecError
from tidemill.envs.reward_workers.reward_protocol import MAX_REPLY, Reply, RewardReply, RewardRequest, Started
from tidemill.observability.stall_report import waiting
from tidemill.runtime.workers import stopped
from tidemill.runtime.workers.child import STARTUP_LIMIT_S, WorkerProcess

_LOOKS = 21  # checks of a worker within its limit
TURN_S = 1.0  # time for a worker with everything loaded to begin a call, on a busy machine


class WorkerFailed(Exception):
    """The worker cannot be used again; `kind` is "timeout", "died", "stopped" or "protocol"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class RewardWorker(WorkerProcess):
    """A scoring worker: `await start(...)`, many `await exchange(...)`; `kill()`, `await reap()`."""

    _loaded = ""  # the function of the latest call

    async def exchange(self, request: RewardRequest, limit_s: float) -> RewardReply:
        """Have the request answered; `limit_s` counts from the worker's start of it. Raises WorkerFailed."""
        known = self._loaded == request.function  # nothing to import: only a remnant of the last call can delay it
        self._loaded = request.function
        started = await self._within(
            self._begin(request), max(limit_s, TURN_S) if known else STARTUP_LIMIT_S, "did not start"
        )
        if not isinstance(started, Started) or started.id != request.id:
            raise WorkerFailed("protocol", f"the scoring worker of {request.name} answered out of turn")
        with waiting("a scoring worker", request.name, limit_s):
            done = await self._within(self._reply(), limit_s, f"{request.name} did not return")
        if not isinstance(done, RewardReply) or done.id != request.id or len(done.outcomes) != max(1, request.count):
            raise WorkerFailed("protocol", f"the scoring worker of {request.name} answered out of turn")
        return done

    async def _begin(self, request: RewardRequest) -> Reply:
        await self.send(serialization.encode(request))
        return await self._reply()

    async def _reply(self) -> Reply:
        return serialization.decode(await self.receive(MAX_REPLY), Reply)

    async def _within(self, work: Awaitable[Reply], limit_s: float, what: str) -> Reply:
        """Await a reply for at most `limit_s` seconds. Raises WorkerFailed.

        Time is counted in checks, not by the clock: while this process itself stood still, it could receive no reply.
        """
        answer = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(stopped.stopped_instead(self.pid, answer))
        try:
            for _ in range(_LOOKS):
                if (await asyncio.wait({watching}, timeout=limit_s / _LOOKS))[0]:
                    break
            else:
                raise WorkerFailed("timeout", f"{what} within {limit_s:g} s and was killed")
            if watching.result():
                raise WorkerFailed("stopped", f"{self.title} was stopped by a signal and was killed")
            return answer.result()
        except CodecError as error:
            raise WorkerFailed("protocol", f"the scoring worker wrote something else than a reply: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerFailed("died", await self.epitaph()) from None
        finally:
            watching.cancel()
            answer.cancel()
