"""Worker process that plays many episodes of a user's environment at once in one event loop.

    python -m tidemill.envs.episode_worker MEMORY_MB PARENT

    Begin -> the environment's run(task, chat) -> Ask, any number of times -> EpisodeEnded

Its values are checked before they are sent, so that a wrong value fails only its own episode.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.core import fault_injection
from tidemill.core.constraints import constraint_of
from tidemill.core.episode_counts import Recorder, counting
from tidemill.core.errors import ConfigError, ContextFull, EpisodeOver
from tidemill.core.import_object import load_object
from tidemill.core.interfaces import Environment
from tidemill.core.outcomes import outcome_of
from tidemill.core.reply import Reply
from tidemill.envs import episode_protocol as wire
from tidemill.envs.agent_chat import AgentChat
from tidemill.envs.chat import count_of
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.tasks import DEEPEST
from tidemill.models.chat_template import is_message
from tidemill.runtime.workers import serve_tasks
from tidemill.runtime.workers.worker_setup import Channel

ROLE = "environment"  # name of this process in fault injection
_REFUSALS = {kind.__name__: kind for kind in (ConfigError, ValueError)}


class RemoteChat(AgentChat):
    """Chat of one episode in a worker: it forwards every reply to the controller's chat."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._turn = channel, 0
        self._answers: dict[int, asyncio.Future[str | Reply]] = {}  # to the turns that are under way
        channel.hear = self._hear

    async def reply(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> str:
        """Ask the controller's `EpisodeChat.reply`. Raises what it raises, and ValueError for other than plain data."""
        most, no_more, held = count_of(max_tokens), bool(last), constraint_of(schema)
        reply = await self._asked(lambda turn: wire.Ask(turn, _message(message), most, no_more, held=held))
        assert isinstance(reply, str)
        return reply

    async def complete(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Any = None,
        max_tokens: int | None = None,
        last: bool = False,
    ) -> Reply:
        """Ask the controller's `EpisodeChat.complete`. Raises what it raises, and ValueError for other than plain data."""
        most, no_more, held = count_of(max_tokens), bool(last), constraint_of(schema)
        schemas = [_plain(each) for each in tools]

        def note(turn: int) -> wire.Ask:
            return wire.Ask(turn, _message(messages), most, no_more, whole=True, tools=schemas, held=held)

        reply = await self._asked(note, alone=False)
        assert isinstance(reply, Reply)
        return reply

    async def ask(self, policy: str, message: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> str:
        """Ask the controller's `EpisodeChat.ask`. Raises what it raises, and ValueError for other than plain data."""
        if not isinstance(policy, str) or not policy:
            raise ValueError(f"chat.ask({policy!r:.80}): expected the name of a frozen policy of the run")
        most = count_of(max_tokens)
        reply = await self._asked(lambda turn: wire.Ask(turn, _message(message), most, True, _text(policy)))
        assert isinstance(reply, str)
        return reply

    async def _asked(self, note: Callable[[int], wire.Ask], alone: bool = True) -> str | Reply:
        """Tell the controller a note, made for the next turn, and wait for its answer. alone: no other may be under way."""
        assert not alone or not self._answers, "one reply at a time: await the one before"
        if self._channel.cancelled:
            raise asyncio.CancelledError("the episode was cancelled")
        fault_injection.reach(ROLE, "reply", self._channel.id)
        self._turn += 1
        turn = self._turn
        self._channel.tell(note(turn))
        answer = self._answers[turn] = asyncio.get_running_loop().create_future()
        try:
            return await answer  # bounded: the controller cancels the episode at its deadline
        except asyncio.CancelledError:
            self._channel.tell(wire.Withdraw(turn))
            raise
        finally:
            del self._answers[turn]

    def _hear(self, note: wire.EpisodeAnswer | wire.ReplyRefused) -> None:
        answer = self._answers.get(note.turn)
        if answer is None or answer.done():
            return  # the answer crossed the environment's Withdraw
        if isinstance(note, wire.EpisodeAnswer):
            answer.set_result(note.reply)
        else:
            answer.set_exception(_refused(note))


class EpisodeHandler:
    """`worker_setup.Handler` of an environment worker."""

    requests, notes = wire.EpisodeRequest, wire.EpisodeAnswer | wire.ReplyRefused
    _environment: Environment
    _name: str

    def load(self, request: wire.EpisodeRequest) -> None:
        if isinstance(request, wire.LoadEnvironment):
            found = load_object(request.reference)
            self._environment = FunctionEnvironment(found) if inspect.iscoroutinefunction(found) else found
            self._name = f"environment {request.name}"

    async def call(self, request: wire.EpisodeRequest, channel: Channel) -> wire.EpisodeResult:
        if isinstance(request, wire.LoadEnvironment):
            return None
        if isinstance(request, wire.Begin):
            return await self._play(request, channel)
        outcomes = await self._environment.judge(request.task, request.attempts)
        return [outcome_of(outcome, self._name) for outcome in outcomes]

    async def _play(self, request: wire.Begin, channel: Channel) -> wire.EpisodeEnded:
        chat = RemoteChat(channel)
        fault_injection.reach(ROLE, "episode", channel.id)
        try:
            with counting(_told(channel), lambda why: channel.tell(wire.EpisodeCounted([], why))):
                outcome = await self._environment.run(request.task, chat)
        except EpisodeOver as over:
            return wire.EpisodeEnded(None, over.finish, str(over))
        return wire.EpisodeEnded(None if outcome is None else outcome_of(outcome, self._name))


def _told(channel: Channel) -> Recorder:
    """A recorder that tells the controller at once, so that what a worker counted before it is killed is known."""
    loop, home = asyncio.get_running_loop(), threading.get_ident()

    def record(names: Sequence[str]) -> None:
        note = wire.EpisodeCounted([*names])
        if threading.get_ident() == home:
            channel.tell(note)
        else:  # a user's function in a thread: frames are written by one thread
            loop.call_soon_threadsafe(channel.tell, note)

    return record


def _refused(note: wire.ReplyRefused) -> Exception:
    if note.finish is not None:
        return ContextFull(note.finish, note.reason) if note.kind == "ContextFull" else EpisodeOver(note.finish, note.reason)
    return _REFUSALS.get(note.kind, ValueError)(note.reason)


def _message(message: Any) -> wire.Message:
    """A message as plain data. Raises ValueError for other or too long values before it copies them."""
    if isinstance(message, str):
        return _text(message)
    if not isinstance(message, Sequence) or not all(isinstance(each, Mapping) for each in message):
        raise ValueError(f"a message of type {type(message).__name__}: expected a text or a list of messages")
    if not all(is_message(each) for each in message):
        raise ValueError("a list of messages: expected role and content (a text, or a list of parts) in each")
    return [{_text(key): _plain(value) for key, value in each.items()} for each in message]


def _plain(value: Any, levels: int = DEEPEST) -> Any:
    """A value of a message (a text, parts, tool calls) as plain data. Raises ValueError for anything else."""
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
    if len(text) > wire.MAX_FRAME:
        raise ValueError(f"a message of {len(text)} characters: at most {wire.MAX_FRAME} bytes are taken")
    return str.__str__(text)  # a plain str, not a subclass


if __name__ == "__main__":
    serve_tasks.serve(EpisodeHandler(), wire.MAX_FRAME)
