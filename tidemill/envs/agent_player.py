"""Plays episodes by a user's program: one process for each episode, or one for all of a run.

    a process for each   gets the task as its input; prints {"id": ..., "score": ...}
    one for all          gets a line for each task, with address and key; prints {"id": ..., "score": ...} in any order

An attempt whose program fails, or is late, cannot be scored. A line without the episode's id is no score: what the program
prints may be text of the policy, which does not know the id.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tidemill.core.amounts import amount
from tidemill.core.chat_interface import Chat
from tidemill.core.episode_counts import counted
from tidemill.core.hardware import usable_cores
from tidemill.core.outcomes import clip, outcome_of
from tidemill.core.types import InfraError, Outcome, Score, Task, Unscorable
from tidemill.envs.agent_process import AgentProcess
from tidemill.gateway.gateway import Gateway, serve_chat

SETTLE_S = 5.0  # seconds after which a program that has asked nothing counts as started
MOST_VARIABLE = 100_000  # bytes of an environment variable, of which Linux takes 128 KiB


class AgentPlayer(Protocol):
    """The two ways to play share this."""

    async def play(self, task: Task, model: Gateway) -> Outcome | None:
        """The outcome of one episode; None when the rewards decide."""
        ...

    async def close(self) -> None: ...


async def play_task(player: AgentPlayer, task: Task, chat: Chat) -> Outcome | None:
    """Play one episode with the chat as the program's model. Raises the chat's own exception."""
    counted("agent/runs")
    async with serve_chat(chat) as model:
        outcome = await player.play(task, model)
        asked = model.counts
    if asked["tokens"] or isinstance(outcome, Unscorable | InfraError):
        return outcome
    how = f"{amount(asked['refused'], 'refused call')}, the latest with: {model.refused}" if asked["refused"] else ""
    return InfraError(clip(f"the agent ended without a reply of the policy: {how or 'it called nothing'}"))


class ProgramPerEpisode:
    """Starts the program for each episode, few at a time: a start may take a core for a second, and episodes are many.

    A program has started when it asks the policy for the first time, and counts as started after `SETTLE_S`.
    """

    def __init__(self, command: Sequence[str], limit_s: float, judged: bool) -> None:
        """judged: rewards decide on the attempts, and what the program prints is not read."""
        self._command, self._limit_s, self._judged = command, limit_s, judged
        self._starting = asyncio.Semaphore(max(2, usable_cores()))

    async def play(self, task: Task, model: Gateway) -> Outcome | None:
        name, said = secrets.token_hex(8), list[Any]()

        def hear(line: bytes) -> None:
            if (verdict := verdict_of(line, name)) is not None:
                said[:] = [verdict]

        process, how, late = None, "", True
        try:
            async with self._starting:  # bounded: a place is free after `SETTLE_S`, and a start takes less than that
                process = await AgentProcess.start(self._command, variables_of(task, name, model), hear)
                ends = time.monotonic() + self._limit_s
                process.tell(json.dumps(described(task, name)).encode() + b"\n", last=True)
                await process.ended_within(min(SETTLE_S, self._limit_s), model.asked, model.failing)
            late = not await process.ended_within(ends - time.monotonic(), model.failing)
        finally:
            if process is not None:
                how = await process.close()
        if late:
            return _late(self._limit_s, process.last_words() if process is not None else "")
        if how:
            return _failed(how)
        if self._judged:
            return None
        return outcome_of_verdict(said[0]) if said else _unscored(NO_SCORE)

    async def close(self) -> None:
        return None


START_S = 30.0  # to start a process
NO_SCORE = 'the agent printed no line {"id": ..., "score": ...} with the id of its task (TIDEMILL_ID)'


class ProgramPerRun:
    """Keeps one process of the program, which plays any number of episodes at a time."""

    def __init__(self, command: Sequence[str], limit_s: float, judged: bool) -> None:
        """judged: see `ProgramPerEpisode`."""
        self._command, self._limit_s, self._judged = command, limit_s, judged
        self._process: AgentProcess | None = None
        self._starting = asyncio.Lock()
        self._open: dict[str, asyncio.Future[Any]] = {}
        self._lines = 0  # that it has printed

    async def play(self, task: Task, model: Gateway) -> Outcome | None:
        name = secrets.token_hex(8)
        process, lines = await self._running(), self._lines
        before = process.complained
        answer = self._open[name] = asyncio.get_running_loop().create_future()
        given = described(task, name) | {"base_url": model.url, "api_key": model.key, "model": model.model}
        given["anthropic_base_url"] = model.anthropic_url
        try:
            process.tell(json.dumps(given).encode() + b"\n")
            await process.ended_within(self._limit_s, answer, model.failing)
        finally:
            del self._open[name]
        if answer.done():
            return None if self._judged else outcome_of_verdict(answer.result())
        if process.ended:
            return _failed(await self._replaced(process))
        if not model.failing.done() and self._lines == lines:  # it may be stopped, and all that follow would be late
            await process.close()
        return _late(self._limit_s, process.last_words(before))

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> AgentProcess:
        async with asyncio.timeout(START_S), self._starting:
            if self._process is None or self._process.ended:
                if self._process is not None:
                    await self._process.close()
                self._process = await AgentProcess.start(self._command, {}, self._hear, None)
            return self._process

    async def _replaced(self, process: AgentProcess) -> str:
        return await process.close() or "ended before it had answered"

    def _hear(self, line: bytes) -> None:
        self._lines += 1
        message = _message(line)
        answer = self._open.get(message["id"]) if message is not None else None
        if answer is not None and not answer.done():
            answer.set_result(message)


def described(task: Task, name: str) -> dict[str, Any]:
    """The task as a program gets it. name: the episode's."""
    return {"id": name, "task": task.id, "prompt": task.prompt, "data": task.data}


def variables_of(task: Task, name: str, model: Gateway) -> dict[str, str]:
    """The environment variables of one episode's program; those that would be too long are left out."""
    prompt = task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt)
    own = {"TIDEMILL_ID": name, "TIDEMILL_TASK": json.dumps(described(task, name)), "TIDEMILL_PROMPT": prompt}
    fits = {key: value for key, value in own.items() if len(value.encode()) <= MOST_VARIABLE and "\0" not in value}
    return model.environment | fits


def verdict_of(line: bytes, name: str) -> dict[str, Any] | None:
    """The message in a line that a program printed, if it is of this episode."""
    message = _message(line)
    return message if message is not None and message["id"] == name else None


def outcome_of_verdict(message: dict[str, Any]) -> Outcome:
    """The outcome that a program gave: its score with parts, or the reason why there is none."""
    value = message.get("score")
    if value is None:
        return _unscored(clip(str(message.get("reason") or "the agent gave no score")))
    outcome = outcome_of(value, "the agent")
    parts = message.get("parts") or {}
    return outcome_of(Score(outcome.value, parts), "the agent") if isinstance(outcome, Score) and parts else outcome


def _late(limit_s: float, last_words: str) -> Unscorable:
    counted("agent/late")
    return Unscorable(f"the agent took longer than {limit_s:g} s{last_words}")


def _failed(how: str) -> Unscorable:
    counted("agent/failed")
    return Unscorable(f"the agent {how}")


def _unscored(reason: str) -> Unscorable:
    counted("agent/unscored")
    return Unscorable(reason)


def _message(line: bytes) -> dict[str, Any] | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("id"), str) else None


PLAYERS: dict[str, Callable[[Sequence[str], float, bool], AgentPlayer]] = {
    "episode": ProgramPerEpisode,
    "run": ProgramPerRun,
}
