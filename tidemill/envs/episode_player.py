"""Controller's side of one environment worker: runs its episodes and watches over it.

    Begin -> Ask -> the episode's real chat (tokens, logprobs, versions stay here) -> EpisodeAnswer -> ... -> EpisodeEnded

A worker is given up when it died, wrote something else than frames, or left pings unanswered for the limit because its
event loop was blocked; or when a cancelled episode did not end within the limit. It is then killed, and every episode that
it was playing fails with the first of these reasons (I5).
"""

from __future__ import annotations

import asyncio
import itertools

import psutil

from tidemill.core import serialization
from tidemill.core.errors import CodecError, EnvironmentLost, EpisodeOver, WorkerLost
from tidemill.core.interfaces import Chat
from tidemill.envs.episode_protocol import (
    MAX_FRAME,
    Ask,
    Begin,
    CancelEpisode,
    EnvironmentLoaded,
    EpisodeAnswer,
    EpisodeEnded,
    FromWorker,
    Judged,
    JudgeRequest,
    LoadEnvironment,
    Pong,
    Raised,
    ReplyRefused,
    ToWorker,
    Withdraw,
    WorkerPing,
)
from tidemill.observability.stall_report import waiting
from tidemill.runtime.workers.child import STARTUP_LIMIT_S, WorkerProcess
from tidemill.runtime.workers.stopped import stopped_instead

_TICKS = 20  # checks of the worker within its limit
Ending = EpisodeEnded | Judged | Raised


class OutOfTurn(Exception):
    """The worker sent a frame that the protocol does not allow at this point."""


_BREAKS = (asyncio.IncompleteReadError, ConnectionError, CodecError, OutOfTurn)


class EpisodeCall:
    """One running episode or judgement in a worker; `chat` is None for a judgement."""

    def __init__(self, player: Player, number: int, chat: Chat | None) -> None:
        self._player, self._number, self._chat = player, number, chat
        self._turn = 0
        self._replying: asyncio.Task[None] | None = None
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def hear(self, frame: Ask | Withdraw | Ending) -> None:
        if self.ending.done():
            return
        before = self._replying
        if isinstance(frame, Ask):
            waits = before is not None and not before.done() and not before.cancelling()
            if self._chat is None or frame.turn <= self._turn or waits:
                raise OutOfTurn(f"episode {self._number} asked while it may not")
            self._turn = frame.turn
            self._replying = asyncio.ensure_future(self._reply(self._chat, frame, before))
        elif isinstance(frame, Withdraw):
            self.stop()
        else:
            self.ending.set_result(frame)

    def fail(self, error: Exception) -> None:
        if not self.ending.done():
            self.ending.set_exception(error)

    def stop(self) -> None:
        """Cancel the running request to the policy, if there is one."""
        if self._replying is not None:
            self._replying.cancel()

    async def _reply(self, chat: Chat, ask: Ask, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})  # bounded: it was withdrawn and so is cancelled
        try:
            text = await chat.reply(ask.message, max_tokens=ask.max_tokens, last=ask.last)
            self._player.post(EpisodeAnswer(self._number, ask.turn, text))
        except (EpisodeOver, ValueError) as error:  # an environment may catch these
            finish = error.finish if isinstance(error, EpisodeOver) else None
            self._player.post(ReplyRefused(self._number, ask.turn, type(error).__name__, str(error), finish))
        except Exception as error:  # from the engine: no answer will come, so the episode ends here
            self.fail(error)


class Player:
    """One worker process as the controller uses it: start, call, serve."""

    def __init__(self, child: WorkerProcess, name: str, limit_s: float) -> None:
        """child: runs `envs.episode_worker`. limit_s: for the answer to a ping, and the end of a cancelled episode."""
        self._child, self._name, self._limit_s = child, name, limit_s
        self._calls: dict[int, EpisodeCall] = {}
        self._leaving: dict[int, int] = {}  # cancelled episodes that have not ended: number of checks since then
        self._pinged = self._ponged = 0
        self._over = False

    @property
    def load(self) -> int:
        """The number of running episodes."""
        return len(self._calls)

    async def start(self, reference: str) -> str:
        """Load the environment in the worker. Returns why the worker cannot be used; empty when it can.

        Raises EnvironmentLost when the environment does not load: another worker could not load it either.
        """
        self.post(LoadEnvironment(reference, self._name))
        try:
            async with asyncio.timeout(STARTUP_LIMIT_S):
                loaded = await self._receive()
            if not isinstance(loaded, EnvironmentLoaded):
                raise OutOfTurn(f"{type(loaded).__name__} before Loaded")
        except TimeoutError:
            return f"{self._child.title} did not load it within {STARTUP_LIMIT_S:g} s"
        except _BREAKS as error:
            return await self._broken(error)
        if loaded.error:
            raise EnvironmentLost(f"environment {self._name} does not load in its worker: {loaded.error}")
        return ""

    async def call(self, order: Begin | JudgeRequest, chat: Chat | None = None) -> Ending:
        """Run an episode or a judgement in the worker.

        Raises WorkerLost when the worker ends before, and whatever the engine raises in a reply.
        """
        self.post(order)
        call = self._calls[order.id] = EpisodeCall(self, order.id, chat)
        try:
            with waiting(f"an environment worker ({self._child.pid})", f"{type(order).__name__.lower()} of {self._name}"):
                return await call.ending  # bounded: by the caller's deadline, and by the watch over the worker
        finally:
            call.stop()
            del self._calls[order.id]
            if not call.ending.done() or call.ending.cancelled() or call.ending.exception() is not None:
                self._leaving[order.id] = 0
                self.post(CancelEpisode(order.id))

    def post(self, frame: ToWorker) -> None:
        if not self._over:
            self._child.post(serialization.encode(frame))

    async def serve(self) -> str:
        """Read the worker's frames and watch over it until it cannot be used; returns why.

        Every open call has failed by then.
        """
        why = f"the worker of environment {self._name} was stopped"
        hearing = asyncio.ensure_future(self._hear())
        work = {hearing, *map(asyncio.ensure_future, (self._watch(), self._standing_still(hearing)))}
        try:
            # bounded: by the watch, while there is anything to wait for
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            why = done.pop().result()
        finally:
            self._over = True
            self._child.kill()
            for task in work:
                task.cancel()
            for call in self._calls.values():
                call.fail(WorkerLost(why))
        return why

    async def _hear(self) -> str:
        try:
            while True:
                self._take(await self._receive())
                await asyncio.sleep(0)  # a flood of frames must not block the event loop
        except _BREAKS as error:
            return await self._broken(error)

    async def _broken(self, error: Exception) -> str:
        if isinstance(error, CodecError):
            return f"{self._child.title} wrote something else than a frame: {error}"
        if isinstance(error, OutOfTurn):
            return f"{self._child.title} spoke out of turn: {error}"
        return await self._child.epitaph()

    def _take(self, frame: FromWorker) -> None:
        match frame:
            case Pong():
                self._ponged = frame.number
            case EnvironmentLoaded():
                raise OutOfTurn("Loaded twice")
            case _:
                if isinstance(frame, Ending):
                    self._leaving.pop(frame.id, None)
                if frame.id in self._calls:
                    self._calls[frame.id].hear(frame)

    async def _watch(self) -> str:
        """Wait until the worker is silent for its limit; returns the reason in words.

        Time is counted in checks, not by the clock: while this process itself stood still, it could not receive an answer.
        """
        numbers, silent = itertools.count(1), 0
        while True:
            await asyncio.sleep(self._limit_s / _TICKS)  # bounded: by `serve`
            silent += 1
            if self._pinged == self._ponged:
                silent = 0
                if self._calls or self._leaving:
                    self._pinged = next(numbers)
                    self.post(WorkerPing(self._pinged))
            for number in self._leaving:
                self._leaving[number] += 1
            if silent > _TICKS:
                return f"environment {self._name} did not give control back for {self._limit_s:g} s{await self._where()}"
            if max(self._leaving.values(), default=0) > _TICKS:
                return f"an episode of environment {self._name} went on for {self._limit_s:g} s after it was cancelled"

    async def _standing_still(self, hearing: asyncio.Future[str]) -> str:
        if await stopped_instead(self._child.pid, hearing):
            return f"{self._child.title} was stopped by a signal"
        return hearing.result()

    async def _where(self) -> str:
        try:
            where = await self._child.where()
        except (psutil.NoSuchProcess, ProcessLookupError):
            where = "its worker is gone"
        return f" ({where})" if where else ""

    async def _receive(self) -> FromWorker:
        return serialization.decode(await self._child.receive(MAX_FRAME), FromWorker)
