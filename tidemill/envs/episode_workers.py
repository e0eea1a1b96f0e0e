"""Environments in worker processes: a user's `run` and `judge` never run in the controller.

    run -> a worker -> Ask -> the episode's real chat (tokens, logprobs, versions stay here) -> EpisodeAnswer -> ...
    worker ended -> its episodes raise WorkerLost -> `lost` returns a pause, or raises if it is one too many -> the next

Tasks do not come from the workers: the environment in this process makes them, and they are deterministic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.chat_interface import Chat
from tidemill.core.episode_counts import NAMES, listener_here, recorder_here
from tidemill.core.errors import CodecError, EnvironmentLost, EpisodeOver, NotImportable, NoWorkers
from tidemill.core.interfaces import Environment, Gold
from tidemill.core.notebook_source.module_writer import reference_for
from tidemill.core.outcomes import clip
from tidemill.core.types import Outcome, Task, Trajectory
from tidemill.envs import episode_protocol as wire
from tidemill.envs.agent_environment import AgentEnvironment
from tidemill.envs.environment import FunctionEnvironment, SingleTurn, gold_of, is_grouped
from tidemill.envs.environment_mixture import Several
from tidemill.envs.environment_settings import WORKERS, AnyEnv, EnvironmentWorkers, PythonSettings
from tidemill.runtime.workers.worker import OpenCall, WorkerKind
from tidemill.runtime.workers.worker_pool import Lost, WorkerPool

MOST_AT_ONCE = 256  # replies of one episode that may be under way
_MODULE = "tidemill.envs.episode_worker"


class EpisodeReplies:
    """The replies to one episode in a worker; `chat` is None for a judgement, which gets none."""

    def __init__(self, chat: Chat | None) -> None:
        self._chat, self._turn = chat, 0
        self._record, self._refused = recorder_here(), listener_here()
        self._open: dict[int, asyncio.Task[None]] = {}  # by turn

    def hear(self, call: OpenCall, note: wire.EpisodeNote) -> None:
        if isinstance(note, wire.EpisodeCounted):
            if not NAMES.issuperset(note.names):
                raise CodecError(f"episode {call.id} counted what nobody counts")
            self._record(note.names)
            if note.refused:
                self._refused(clip(note.refused))
            return
        if isinstance(note, wire.Withdraw):
            if (withdrawn := self._open.get(note.turn)) is not None:
                withdrawn.cancel()
            return
        waits = not note.whole and any(not each.cancelling() for each in self._open.values())
        if self._chat is None or note.turn <= self._turn or waits or len(self._open) >= MOST_AT_ONCE:
            raise CodecError(f"episode {call.id} asked while it may not")
        self._turn = note.turn
        before = [] if note.whole else list(self._open.values())
        replying = self._open[note.turn] = asyncio.ensure_future(self._reply(self._chat, call, note, before))
        replying.add_done_callback(lambda _, turn=note.turn: self._open.pop(turn))

    def stop(self) -> None:
        for each in self._open.values():
            each.cancel()

    async def _reply(self, chat: Chat, call: OpenCall, ask: wire.Ask, before: Sequence[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)  # bounded: they were withdrawn and so are cancelled
        limits: dict[str, Any] = {"schema": ask.held, "max_tokens": ask.max_tokens, "last": ask.last}
        try:
            if ask.policy:
                reply = await chat.ask(ask.policy, ask.message, max_tokens=ask.max_tokens)
            elif ask.whole:
                reply = await chat.complete(ask.message, tools=ask.tools, **limits)
            else:
                reply = await chat.reply(ask.message, **limits)
            call.tell(wire.EpisodeAnswer(ask.turn, reply))
        except (EpisodeOver, ValueError) as error:  # an environment may catch these
            finish = error.finish if isinstance(error, EpisodeOver) else None
            call.tell(wire.ReplyRefused(ask.turn, type(error).__name__, str(error), finish))
        except Exception as error:  # from the engine: no answer will come, so the episode ends here
            call.fail(error)


class WorkerEnvironment:
    """Environment with the tasks of `inner`, whose episodes and judgements run in worker processes."""

    def __init__(self, inner: Environment, reference: str, settings: EnvironmentWorkers, lost: Lost) -> None:
        """reference: FILE.py:NAME or MODULE:NAME by which workers load `inner` or its function."""
        self.name, self._inner = inner.name, inner
        kind = WorkerKind(
            _MODULE,
            f"the worker of environment {self.name}",
            results=wire.EpisodeResult,
            notes=wire.EpisodeNote,
            memory_mb=settings.memory_mb,
            most=wire.MAX_FRAME,
            patience_s=settings.limit_s,
        )
        self.pool = WorkerPool(
            kind, settings.workers or WORKERS, preload=wire.LoadEnvironment(reference, self.name), lost=lost
        )

    def tasks(self, split: str) -> Sequence[Task]:
        return self._inner.tasks(split)

    @property
    def grouped(self) -> bool:
        return is_grouped(self._inner)

    def gold(self, task: Task) -> Gold:
        return gold_of(self._inner, task, "the environment")

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        """Play one episode in the worker with the fewest; returns its outcome.

        Raises EpisodeOver when the environment does not catch it, EpisodeFailed for its other failures (WorkerLost, a kind
        of it, may be another episode's fault), EnvironmentLost when no worker is available any more, and what the engine
        raises in a reply.
        """
        ended = await self._call(wire.Begin(task), f"an episode of environment {self.name}", chat)
        assert isinstance(ended, wire.EpisodeEnded)
        if ended.finish is not None:
            raise EpisodeOver(ended.finish, ended.reason)
        return ended.outcome

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        judged = await self._call(wire.JudgeRequest(task, attempts), f"a judgement of environment {self.name}", None)
        assert isinstance(judged, list)
        return judged

    async def close(self) -> None:
        """Kill the workers, also in the middle of episodes, and wait until they are gone."""
        await self.pool.close()
        await self._inner.close()

    async def _call(self, request: wire.Begin | wire.JudgeRequest, what: str, chat: Chat | None) -> wire.EpisodeResult:
        replies = EpisodeReplies(chat)
        try:
            return await self.pool.call(request, what, hear=replies.hear)
        except NoWorkers as gone:
            raise EnvironmentLost(str(gone)) from gone
        finally:
            replies.stop()


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
        parts = environment.parts.items()
        moved = {name: in_workers(part, settings, lost, note, own.get(name), source) for name, part in parts}
        return Several(moved, environment.weights)
    if isinstance(environment, SingleTurn) or settings.workers == 0:
        return environment
    if isinstance(environment, AgentEnvironment):
        from tidemill.envs.agent_workers import AgentWorkers  # here: its base stands above

        return AgentWorkers(environment, settings, lost)
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
