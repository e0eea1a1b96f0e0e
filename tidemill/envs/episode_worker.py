"""Worker process that plays many episodes of a user's environment at once in one event loop.

    python -m tidemill.envs.episode_worker MEMORY_MB PARENT

    Begin -> the environment's run(task, chat) -> Ask, any number of times -> EpisodeEnded or Raised

The code it runs is not trusted to behave (see `workers.worker_setup`). Its values are checked before they are sent, so that
a wrong value fails only its own episode. Answers to pings show that the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from tidemill.core import fault_injection, serialization
from tidemill.core.errors import ConfigError, ContextFull, EpisodeOver, TemplateRewritesHistory
from tidemill.core.import_object import load_object
from tidemill.core.interfaces import Environment
from tidemill.core.outcomes import clip, outcome_of
from tidemill.envs.chat import count_of
from tidemill.envs.environment import FunctionEnvironment
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
    Message,
    Pong,
    Raised,
    ReplyRefused,
    ToWorker,
    Withdraw,
    WorkerPing,
)
from tidemill.envs.tasks import DEEPEST
from tidemill.models.messages import is_message
from tidemill.runtime.workers import worker_setup
from tidemill.runtime.workers.pipe_frames import HEADER_BYTES, size_of

ROLE = "environment"  # name of this process in fault injection
_REASON = 2000  # characters of an exception that are sent
_TRACE = 6000
_REFUSALS = {kind.__name__: kind for kind in (TemplateRewritesHistory, ConfigError, ValueError)}


class RemoteChat:
    """Chat of one episode in a worker: it forwards every reply to the controller's chat."""

    def __init__(self, worker: Worker, episode: int) -> None:
        self._worker, self._episode, self._turn = worker, episode, 0
        self._answer: asyncio.Future[str] | None = None
        self._over = False

    async def reply(
        self, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, last: bool = False
    ) -> str:
        """Ask the controller's `EpisodeChat.reply`; raises what that raises.

        Raises ValueError for a message that is too long or not plain data.
        """
        assert self._answer is None, "one reply at a time: await the one before"
        if self._over:
            raise asyncio.CancelledError("the episode was cancelled")
        fault_injection.reach(ROLE, "reply", self._episode)
        self._turn += 1
        self._worker.say(Ask(self._episode, self._turn, _message(message), count_of(max_tokens), bool(last)))
        self._answer = asyncio.get_running_loop().create_future()
        try:
            return await self._answer  # bounded: the controller cancels the episode at its deadline
        except asyncio.CancelledError:
            self._worker.say(Withdraw(self._episode, self._turn))
            raise
        finally:
            self._answer = None

    def hear(self, frame: EpisodeAnswer | ReplyRefused) -> None:
        if frame.turn != self._turn or self._answer is None or self._answer.done():
            return  # the answer crossed the environment's Withdraw
        if isinstance(frame, EpisodeAnswer):
            self._answer.set_result(frame.text)
        else:
            self._answer.set_exception(_refused(frame))

    def cancel(self) -> None:
        self._over = True


class Worker:
    """The episodes of one worker process, and its frames."""

    def __init__(self, frames_out: int) -> None:
        self._pipe, self._here = os.fdopen(frames_out, "wb", buffering=0, closefd=False), os.getpid()
        self._environment: Environment | None = None
        self._name = ""
        self._under_way: dict[int, tuple[asyncio.Task[FromWorker], RemoteChat]] = {}

    async def serve(self, frames_in: int) -> None:
        """Read and handle frames until the controller closes the pipe or is gone."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        # A fork that returns into this loop ends at once: it shares the loop's files with this process.
        os.register_at_fork(after_in_child=lambda: loop.call_soon(os._exit, 0))
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(frames_in, "rb", buffering=0))
        try:
            while True:
                # bounded: the worker lives as long as the controller, whose end closes the pipe
                size = size_of(await reader.readexactly(HEADER_BYTES))
                # bounded: as above
                self._hear(serialization.decode(await reader.readexactly(size), ToWorker))
        except asyncio.IncompleteReadError:
            return

    def say(self, frame: FromWorker) -> None:
        """Send a frame. Raises ValueError, and sends nothing, when it is too long or not encodable."""
        if os.getpid() != self._here:
            os._exit(0)  # this is a fork made by the environment that returned from it as well
        try:
            body = serialization.encode(frame)
            if len(body) > MAX_FRAME:
                raise ValueError(f"{len(body)} bytes, at most {MAX_FRAME} are taken")
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        worker_setup.write(self._pipe, body)

    def _hear(self, frame: ToWorker) -> None:
        match frame:
            case LoadEnvironment():
                self.say(EnvironmentLoaded(self._load(frame)))
            case WorkerPing():
                self.say(Pong(frame.number))
            case Begin():
                chat = RemoteChat(self, frame.id)
                self._begin(frame.id, chat, self._play(frame, chat))
            case JudgeRequest():
                self._begin(frame.id, RemoteChat(self, frame.id), self._judge(frame))
            case CancelEpisode():
                if frame.id in self._under_way:
                    task, chat = self._under_way[frame.id]
                    chat.cancel()
                    task.cancel()
            case EpisodeAnswer() | ReplyRefused():
                if frame.id in self._under_way:
                    self._under_way[frame.id][1].hear(frame)

    def _load(self, order: LoadEnvironment) -> str:
        self._name = order.name
        try:
            found = load_object(order.reference)
        except ConfigError as error:
            return clip(str(error), _REASON)
        self._environment = FunctionEnvironment(found) if inspect.iscoroutinefunction(found) else found
        return ""

    def _begin(self, number: int, chat: RemoteChat, work: Coroutine[Any, Any, FromWorker]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way[number] = task, chat
        task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: asyncio.Task[FromWorker]) -> None:
        """Report the end of a task, cancelled ones included: the controller waits for their end."""
        del self._under_way[number]
        try:
            self.say(EpisodeEnded(number, None) if task.cancelled() else task.result())
        except ValueError as error:
            self.say(Raised(number, clip(f"what environment {self._name} gave does not travel: {error}", _REASON)))

    async def _play(self, order: Begin, chat: RemoteChat) -> FromWorker:
        assert self._environment is not None
        try:
            fault_injection.reach(ROLE, "episode", order.id)
            outcome = await self._environment.run(order.task, chat)
            return EpisodeEnded(order.id, None if outcome is None else outcome_of(outcome, f"environment {self._name}"))
        except EpisodeOver as over:
            return Raised(order.id, str(over), over.finish)
        except BaseException as error:
            return _raised(order.id, error)

    async def _judge(self, order: JudgeRequest) -> FromWorker:
        assert self._environment is not None
        try:
            outcomes = await self._environment.judge(order.task, order.attempts)
            return Judged(order.id, [outcome_of(outcome, f"environment {self._name}") for outcome in outcomes])
        except BaseException as error:
            return _raised(order.id, error)


def _raised(number: int, error: BaseException) -> Raised:
    """The frame for an exception of the user's code, sys.exit() included.

    A cancellation that the controller requested is raised again.
    """
    task = asyncio.current_task()
    assert task is not None
    if isinstance(error, asyncio.CancelledError) and task.cancelling():
        raise error
    trace = "".join(traceback.format_exception(error))
    return Raised(number, clip(f"{type(error).__name__}: {error}", _REASON), trace=trace[-_TRACE:])


def _refused(frame: ReplyRefused) -> Exception:
    if frame.finish is not None:
        return (
            ContextFull(frame.finish, frame.reason)
            if frame.kind == "ContextFull"
            else EpisodeOver(frame.finish, frame.reason)
        )
    return _REFUSALS.get(frame.kind, ValueError)(frame.reason)


def _message(message: Any) -> Message:
    """A message as plain data. Raises ValueError for other or too long values before it copies them."""
    if isinstance(message, str):
        return _text(message)
    if not isinstance(message, Sequence) or not all(isinstance(each, Mapping) for each in message):
        raise ValueError(f"a message of type {type(message).__name__}: expected a text or a list of messages")
    if not all(is_message(each) for each in message):
        raise ValueError("a list of messages: expected role and content (a text, or a list of parts) in each")
    return [{_text(key): _plain(value) for key, value in each.items()} for each in message]


def _plain(value: Any, levels: int = DEEPEST) -> Any:
    """A value of a message (a text, the parts of a content, tool calls) as plain data.

    Raises ValueError for anything else.
    """
    if isinstance(value, str):
        return _text(value)
    if levels and isinstance(value, Mapping):
        return {_text(key): _plain(each, levels - 1) for key, each in value.items()}
    if levels and isinstance(value, list | tuple):
        return [_plain(each, levels - 1) for each in value]
    if value is None or type(value) in (bool, int, float):
        return value
    raise ValueError(f"a list of messages with a {type(value).__name__}: expected texts, numbers, lists and mappings")


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"a list of messages with a key of type {type(text).__name__}: expected texts")
    if len(text) > MAX_FRAME:
        raise ValueError(f"a message of {len(text)} characters: at most {MAX_FRAME} bytes are taken")
    return str.__str__(text)  # a plain str, not a subclass


def main(memory_mb: int, parent: int) -> None:
    frames_in, frames_out = worker_setup.settle(memory_mb, parent)
    faulthandler.enable()  # a crash writes its stack
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # a blocked event loop writes its stack on request
    asyncio.run(Worker(frames_out).serve(frames_in))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
