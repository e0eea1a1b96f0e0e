"""Environments in worker processes: a user's `run` and `judge` never run in the controller.

    run -> the worker with the fewest episodes -> its outcome
    worker lost -> its episodes raise WorkerLost -> `lost` returns a pause, or raises if it is one too many -> another worker

Tasks do not come from the workers: the environment in this process makes them, and they are deterministic.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tidemill.core.errors import EnvironmentLost, EpisodeFailed, EpisodeOver, NotImportable
from tidemill.core.interfaces import Chat, Checkable, Environment, Gold
from tidemill.core.notebook_source.module_writer import reference_for
from tidemill.core.types import Outcome, Task, Trajectory, Unscorable
from tidemill.envs.environment import FunctionEnvironment, SingleTurn
from tidemill.envs.environment_mixture import Several
from tidemill.envs.environment_settings import AnyEnv, EnvironmentWorkers, PythonSettings
from tidemill.envs.episode_player import Player
from tidemill.envs.episode_protocol import Begin, EpisodeEnded, Judged, JudgeRequest, Raised
from tidemill.runtime.workers.child import REAP_LIMIT_S, WorkerProcess
from tidemill.runtime.workers.guard_client import Guard

WORKERS = 2  # default for a user's environment
Lost = Callable[[str], float]
"""From the reason of a lost worker to the seconds before the next one starts. Raises when it was one too many."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Place of one worker, which successors take over."""

    player: Player | None = None
    late: bool = False  # the worker was lost, and its successor is not up yet
    waiting: int = 0  # episodes that wait for the worker

    @property
    def order(self) -> tuple[bool, int]:
        return self.late, self.waiting + (self.player.load if self.player else 0)


class WorkerEnvironment:
    """Environment with the tasks of `inner`, whose episodes and judgements run in worker processes."""

    def __init__(self, inner: Environment, reference: str, settings: EnvironmentWorkers, lost: Lost) -> None:
        """reference: FILE.py:NAME or MODULE:NAME by which workers load `inner` or its function."""
        self.name = inner.name
        self._inner, self._reference, self._settings, self._lost = inner, reference, settings, lost
        self._slots = [_Slot() for _ in range(settings.workers or WORKERS)]
        self._keepers: list[asyncio.Task[None]] = []
        self._guard = Guard()
        self._ids = itertools.count()
        self._changed = asyncio.Event()  # replaced by a new one when it is set
        self._failure: Exception | None = None  # why no worker is available any more

    def tasks(self, split: str) -> Sequence[Task]:
        return self._inner.tasks(split)

    @property
    def grouped(self) -> bool:
        return not isinstance(self._inner, Checkable) or self._inner.grouped

    def gold(self, task: Task) -> Gold:
        if isinstance(self._inner, Checkable):
            return self._inner.gold(task)
        return Unscorable("the environment does not say what would be right")

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        """Play one episode in the worker with the fewest; returns its outcome.

        Raises EpisodeOver when the environment does not catch it, EpisodeFailed for its other failures (WorkerLost, a kind
        of it, may be another episode's fault), EnvironmentLost when no worker is available any more, and what the engine
        raises in a reply.
        """
        player = await self._player()
        ended = await player.call(Begin(next(self._ids), task), chat)
        assert isinstance(ended, EpisodeEnded | Raised)
        return ended.outcome if isinstance(ended, EpisodeEnded) else _raise(ended)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        player = await self._player()
        judged = await player.call(JudgeRequest(next(self._ids), task, attempts))
        assert isinstance(judged, Judged | Raised)
        return list(judged.outcomes) if isinstance(judged, Judged) else _raise(judged)

    async def close(self) -> None:
        """Kill the workers, also in the middle of episodes, and wait until they are gone."""
        self._failure = EnvironmentLost(f"environment {self.name} was closed")
        self._wake()
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=2 * REAP_LIMIT_S)
        await self._guard.close()
        await self._inner.close()

    async def _player(self) -> Player:
        """The least busy worker that is up, or the first one to come up.

        Raises EnvironmentLost when no worker is available any more.
        """
        if not self._keepers:
            self._keepers = [asyncio.ensure_future(self._keep(slot)) for slot in self._slots]
        while self._failure is None:
            slot = min(self._slots, key=lambda each: each.order)
            if slot.player is not None:
                return slot.player
            slot.waiting += 1
            try:
                await self._changed.wait()  # bounded: by the caller's deadline; every start of a worker ends
            finally:
                slot.waiting -= 1
        raise EnvironmentLost(str(self._failure)) from self._failure

    async def _keep(self, slot: _Slot) -> None:
        """Keep a slot filled with one worker after another, until an error ends the environment."""
        try:
            while True:
                why = await self._employ(slot)
                slot.late = True
                self._wake()
                await asyncio.sleep(self._lost(why))  # bounded: by its argument
        except Exception as error:  # any error: callers that wait for a worker would wait for ever
            self._failure = error
            self._wake()

    async def _employ(self, slot: _Slot) -> str:
        """Run one worker from its start to its end; returns why it ended.

        Raises EnvironmentLost when the environment does not load.
        """
        await self._guard.start()
        child = await WorkerProcess.start(
            "tidemill.envs.episode_worker", f"the worker of environment {self.name}", self._settings.memory_mb
        )
        self._guard.add(child.pid)
        try:
            player = Player(child, self.name, self._settings.limit_s)
            if why := await player.start(self._reference):
                return why
            slot.player, slot.late = player, False
            self._wake()
            return await player.serve()
        finally:
            slot.player = None
            child.kill()
            await child.reap()
            child.kill()  # again, for processes forked while the first signal was on its way
            self._guard.discard(child.pid)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _raise(raised: Raised) -> NoReturn:
    if raised.finish is not None:
        raise EpisodeOver(raised.finish, raised.reason)
    failed = EpisodeFailed(raised.reason)
    failed.add_note(raised.trace)
    raise failed


def in_workers(
    environment: Environment,
    settings: EnvironmentWorkers,
    lost: Lost,
    note: Callable[[str], None],
    written: AnyEnv | tuple[AnyEnv, ...] | None = None,
    source: Path | None = None,
) -> Environment:
    """Move an environment's code into worker processes, unless settings or kind keep it in this one.

    written: its settings in the recipe; None when it was given as an object. note: called with a sentence when the
    environment has to stay in this process. source: a folder for the source of a function that has no file.
    """
    if isinstance(environment, Several):
        own = {each.name: each for each in written} if isinstance(written, tuple) else {}
        return environment.each(lambda name, part: in_workers(part, settings, lost, note, own.get(name), source))
    if isinstance(environment, SingleTurn) or settings.workers == 0:
        return environment
    why = "an object lives in one process"
    if isinstance(environment, FunctionEnvironment) and not isinstance(written, PythonSettings):
        if settings.workers is None and environment.function.__module__.split(".")[0] == "tidemill":
            return environment  # this package's own code needs no worker
        try:
            return WorkerEnvironment(environment, reference_for(environment.function, source, "environment"), settings, lost)
        except NotImportable as reason:
            written, why = None, str(reason)
    if isinstance(written, PythonSettings):
        place, _, name = written.paths[0].rpartition(":")
        place = str(Path(place).expanduser().resolve()) if place.endswith(".py") else place
        return WorkerEnvironment(environment, f"{place}:{name}", settings, lost)
    note(
        f"environment {environment.name} runs in this process, and one that blocks or crashes there takes the run with it: "
        f"{why}; define it at the top of a file, or name it in the recipe as FILE.py:NAME"
    )
    return environment
