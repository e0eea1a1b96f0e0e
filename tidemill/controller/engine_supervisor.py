"""Supervisor of the engines' processes: replaces those that end, starts more, stops those that are drained.

    lost -> budget (so many restarts in a window, each after a longer pause) -> start -> a new member joins the pool
                    \\-> spent: RunFailed, with the first cause

The trainer is no member of a pool: `run/trainer_restart.py` starts it again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tidemill.controller.engine_pool import LOST, EnginePool, Member
from tidemill.core.errors import RunFailed, StartFailed
from tidemill.core.interfaces import Engine
from tidemill.runtime.placement import Handle

LONGEST_PAUSE_S = 60.0
LASTING = 10  # an engine that ran for this many times the pause before its restart has recovered


@dataclass(slots=True)
class Budget:
    """The number of restarts that one name has left, and the pause before each."""

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
    """Keeps the engines of a pool up, and adds and drains some. `run` ends only by an error: a spent budget."""

    def __init__(
        self,
        pool: EnginePool,
        role: str,
        handles: Sequence[Handle[Engine]],
        start: Callable[[str], Awaitable[Handle[Engine]]],
        member: Callable[[Handle[Engine]], Awaitable[Member]],
        budget: Callable[[], Budget],
        tell: Callable[[str, dict], None],
    ) -> None:
        """Watch the processes behind the pool's first members.

        role: begins the names of engines that are added. start: starts an engine's process by its name. member: reads what a
        started engine can do, and raises ConfigError if the run cannot take it. budget: makes the budget of one name. tell:
        takes (kind of event, details).
        """
        self._pool, self._role, self._start, self._member, self._tell = pool, role, start, member, tell
        self.handles = {handle.name: handle for handle in handles}
        self._budget, self._budgets = budget, {name: budget() for name in self.handles}
        self._leaving: set[str] = set()
        self._watching: asyncio.TaskGroup | None = None
        pool.supervised(self._lost)

    async def run(self) -> None:
        """Keep every engine up until the run ends, or raise RunFailed."""
        async with asyncio.TaskGroup() as self._watching:
            for name in self.handles:
                self._watching.create_task(self._keep_up(name))

    async def add(self) -> str:
        """Start one more engine and let it join the pool; returns its name, the first that is free."""
        name = next(name for i in itertools.count() if (name := f"{self._role}-{i}") not in self._budgets)
        self._budgets[name] = self._budget()
        try:
            await self._join(name)
        except BaseException:
            self._forget(name)
            raise
        self._tell("engine_joined", {"engine": name})
        if self._watching is not None:
            self._watching.create_task(self._keep_up(name))
        return name

    async def remove(self, name: str, *, hand_over: bool = False) -> None:
        """Let an engine leave the pool as `EnginePool.drain` says, and stop its process."""
        first = name not in self._leaving
        self._leaving.add(name)
        try:
            await self._pool.drain(name, hand_over=hand_over)  # bounded: requests have deadlines
        except ValueError:
            if first:
                self._leaving.discard(name)
            raise
        if handle := self._forget(name):
            await handle.stop()
            self._tell("engine_drained", {"engine": name})

    def _forget(self, name: str) -> Handle[Engine] | None:
        self._leaving.discard(name)
        self._budgets.pop(name, None)
        return self.handles.pop(name, None)

    def _lost(self, name: str, why: str) -> None:
        """Kill an engine that the pool could not use any more; its process may not know."""
        self.handles[name].kill(f"was killed: {why}")

    async def _keep_up(self, name: str) -> None:
        while True:
            handle = self.handles[name]
            how = await handle.wait()  # bounded: it watches, for as long as the run goes on
            self._pool.drop(name)
            await handle.stop()
            if name in self._leaving or self.handles.get(name) is not handle:
                return  # it was drained
            self._tell("engine_lost", {"engine": name, "how": how})
            await self._bring_back(name, f"{name} {how}")

    async def _bring_back(self, name: str, reason: str) -> None:
        while True:
            pause = self._budgets[name].spend(reason)
            await asyncio.sleep(pause)  # bounded: by the budget
            try:
                await self._join(name)
            except (StartFailed, *LOST, TimeoutError) as error:
                reason = str(error)
                continue
            self._tell("engine_restarted", {"engine": name, "after_s": pause})
            return

    async def _join(self, name: str) -> None:
        """Start a process, and let it join. If that fails, the process is gone."""
        handle = self.handles[name] = await self._start(name)
        try:
            await self._pool.join(await self._member(handle))  # bounded: its update has a deadline
        except BaseException as error:
            handle.kill(f"could not join: {error}")
            await handle.stop()
            raise
