"""Restarts rollout engines that end, as long as their restart budget lasts.

    ended -> budget (so many restarts in a window, each after a longer pause) -> start -> pool.admit (present version) -> up
                     \\-> spent: RunFailed, with the first cause

There is only one trainer: when it ends, the run ends with it, in a state that can be resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tidemill.controller.engine_pool import LOST, EnginePool
from tidemill.core.errors import RunFailed, StartFailed
from tidemill.core.interfaces import Engine
from tidemill.runtime.placement import Handle

LONGEST_PAUSE_S = 60.0
LASTING = 10  # an engine that ran for this many times the pause before its restart has recovered


@dataclass(slots=True)
class Budget:
    """The number of restarts that one place has left, and the pause before each."""

    restarts: int  # within the window
    window_s: float
    backoff_s: float  # first pause before restarting an engine that did not last, doubled each time
    clock: Callable[[], float] = time.monotonic
    _spent: deque[float] = field(default_factory=deque)
    _first: str = ""
    _pause: float = 0.0  # before the latest restart

    def spend(self, reason: str) -> float:
        """Spend one restart for this reason, and return the pause before it in seconds.

        Raises RunFailed when none is left.
        """
        now = self.clock()
        while self._spent and now - self._spent[0] > self.window_s:
            self._spent.popleft()
        if not self._spent:
            self._first = reason
        if len(self._spent) >= self.restarts:
            end = f"; the first time: {self._first}" if self._first != reason else ""
            raise RunFailed(
                f"{reason}; it was started again {len(self._spent)} times within {self.window_s:g} s already "
                f"(supervise.restarts){end}"
            )
        lasted = not self._spent or now - self._spent[-1] >= self._pause + LASTING * max(self._pause, self.backoff_s)
        self._pause = 0.0 if lasted else min(max(2 * self._pause, self.backoff_s), LONGEST_PAUSE_S)
        self._spent.append(now)
        return self._pause


class Supervisor:
    """Restarts the engines of a pool. `run` ends only by an error: a spent budget."""

    def __init__(
        self,
        pool: EnginePool,
        handles: Sequence[Handle[Engine]],
        start: Callable[[int], Awaitable[Handle[Engine]]],
        budget: Callable[[], Budget],
        tell: Callable[[str, dict], None],
    ) -> None:
        """Watch the engines behind `handles`, one for each place of the pool.

        start: starts the process of a place again. budget: makes the budget of one place. tell: takes (kind of event,
        details).
        """
        self._pool, self._start, self._tell = pool, start, tell
        self.handles = list(handles)
        self._budgets = [budget() for _ in handles]
        pool.supervised(self._lost)

    async def run(self) -> None:
        """Keep every engine up until the run ends, or raise RunFailed."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self.handles)):
                group.create_task(self._keep_up(index))

    def _lost(self, index: int, why: str) -> None:
        """Kill an engine that the pool could not use any more; its process may not know."""
        self.handles[index].kill(f"was killed: {why}")

    async def _keep_up(self, index: int) -> None:
        while True:
            handle = self.handles[index]
            how = await handle.wait()  # bounded: it watches, for as long as the run goes on
            self._pool.drop(index)
            await handle.stop()
            self._tell("engine_lost", {"engine": handle.name, "how": how})
            await self._bring_back(index, f"{handle.name} {how}")

    async def _bring_back(self, index: int, reason: str) -> None:
        while True:
            pause = self._budgets[index].spend(reason)
            await asyncio.sleep(pause)  # bounded: by the budget
            try:
                handle = self.handles[index] = await self._start(index)
                await self._pool.admit(index, handle.proxy)
            except (StartFailed, *LOST, TimeoutError) as error:
                reason = str(error)
                continue
            self._tell("engine_restarted", {"engine": handle.name, "after_s": pause})
            return
