"""Tools that take their worker with them, are slow or lie, and policies that call without end.

See the table in `reliability/test_fault_table.py`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envs.scripted_engine import chat_tokenizer
from one_attempt import Playing, attempt, gone, leaves_nothing
from test_conversations_with_tools import HERMES

import tidemill
from tidemill.core.chat_interface import Chat
from tidemill.core.episode_counts import counting
from tidemill.core.errors import CodecError, SandboxFailed
from tidemill.core.types import InfraError, Score, Task
from tidemill.envs import episode_protocol as wire
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.environment_settings import EnvironmentWorkers
from tidemill.envs.episode_workers import EpisodeReplies, WorkerEnvironment
from tidemill.tools.tool_set import ToolSet

FILE = Path(__file__).with_name("environments_of_faults.py")


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


class Lies:
    """Tools that answer something else than they should."""

    def huge(self) -> str:
        """Say too much."""
        return "x" * (32 << 20)

    def half(self) -> str:
        """Say half a JSON, and half a character."""
        return '{"a": [1, "\ud83d'

    def wrong(self) -> str:
        """Say no text."""
        return b"\x89PNG\xff"  # type: ignore[return-value]

    def nan(self) -> float:
        """Say no number."""
        return float("nan")

    def cycle(self) -> Any:
        """Say something without end."""
        endless: list[Any] = []
        endless.append(endless)
        return endless


async def ask_and_call(chat: Chat, tools: ToolSet, *names: str) -> tuple[list[str], list[str]]:
    await chat.reply("hello")
    found = await tools.results([called(name) for name in names])
    return [each.content for each in found], [each.fault for each in found]


@pytest.mark.runs
@pytest.mark.parametrize(("sign", "how"), [("SIGKILL", "killed by SIGKILL"), ("SIGSTOP", "stopped by a signal")])
async def test_a_tool_that_kills_or_stops_its_worker(sign: str, how: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with leaves_nothing():
        settings, where = EnvironmentWorkers(workers=1, limit_s=60.0), f"{FILE}:by_tools"
        environment = WorkerEnvironment(FunctionEnvironment(by_tools), where, settings, lambda reason: 0.0)
        try:
            found = await attempt(environment, Task("t", "hello", {"signal": sign, "note": str(note)}))
        finally:
            await environment.close()
    assert isinstance(found.outcome, InfraError) and how in found.outcome.reason
    pids = [int(each) for each in note.read_text().split()]
    assert len(pids) == len(set(pids)) == 2 and all(map(gone, pids)), "it was begun anew once, in another worker"
    assert found.counts == {"workers/lost": 2, "tools/calls": 2}, "what it had counted before is known"


async def by_tools(task: Task, chat: Chat) -> Any:
    raise AssertionError("it runs in a worker")


def test_a_worker_counts_nothing_else() -> None:
    told, why = list[str](), list[str]()
    with counting(told.extend, why.append):
        replies = EpisodeReplies(None)
    call: Any = SimpleNamespace(id=7)
    replies.hear(call, wire.EpisodeCounted(["tools/calls", "tools/late"]))
    with pytest.raises(CodecError, match="episode 7 counted what nobody counts"):
        replies.hear(call, wire.EpisodeCounted(["tools/calls", "tokens"]))
    replies.hear(call, wire.EpisodeCounted([], "400 " + "x" * 9000))
    assert told == ["tools/calls", "tools/late"] and len(why) == 1 and len(why[0]) < 400


async def test_a_slow_tool() -> None:
    ended = []

    @tidemill.tool(limit_s=0.01)
    async def slow() -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)
        return "late"

    async def run(task: Task, chat: Chat) -> Any:
        said, faults = await ask_and_call(chat, ToolSet([slow]), "slow", "slow")
        assert said == ["error: slow gave no result within 0.01 s"] * 2 and faults == ["late"] * 2
        return Score(0.5)

    found = await attempt(Playing(run))
    assert found.outcome == Score(0.5) and found.counts == {"tools/calls": 2, "tools/late": 2} and ended == [1, 1]


async def test_a_lying_tool() -> None:
    seen: dict[str, str] = {}

    async def run(task: Task, chat: Chat) -> Any:
        names = ["huge", "half", "wrong", "nan", "cycle"]
        said, faults = await ask_and_call(chat, ToolSet([getattr(Lies(), name) for name in names]), *names)
        seen.update(zip(names, said, strict=True))
        assert faults == ["", "", "", "", "error"]
        await chat.reply([{"role": "user", "content": text} for text in said])  # whatever it is can be told
        return Score(0.5)

    found = await attempt(Playing(run))
    assert found.outcome == Score(0.5) and found.counts == {"tools/calls": 5, "tools/errors": 1}
    assert seen["huge"].endswith("[cut after 16384 of 33554432 characters]") and len(seen["huge"]) < 17_000
    assert seen["half"] == '{"a": [1, "\\ud83d' and "ValueError" in seen["cycle"]
    "".join(seen.values()).encode()


async def test_a_tool_that_cannot_work_makes_no_score() -> None:
    """Nor does a fault of the sandbox within it, after which nothing is known of the call."""
    for error in (tidemill.ToolUnavailable("the index is gone"), SandboxFailed("the sandbox is gone")):

        async def run(task: Task, chat: Chat, error: Exception = error) -> Any:
            await chat.reply("hello")

            def search() -> str:
                """Search."""
                raise error

            await ToolSet([search]).call(called("search"))
            return Score(1.0)

        found = await attempt(Playing(run))
        assert isinstance(found.outcome, InfraError) and str(error) in found.outcome.reason
        assert found.counts == {"tools/calls": 1, "tools/unavailable": 1}


@pytest.mark.runs
async def test_ten_thousand_calls_in_one_reply_run_none() -> None:
    ran = []

    def note() -> str:
        """Note."""
        ran.append(1)
        return "noted"

    async def run(task: Task, chat: Chat) -> Any:
        done = await chat.work("hello", [note])
        calls = done.reply.message["tool_calls"]
        assert (done.ended, len(calls), len(done.results)) == ("max_calls", 10_000, 0)
        return Score(0.0)

    text = f"<tool_call>{json.dumps({'name': 'note', 'arguments': {}})}</tool_call>" * 10_000
    found = await attempt(Playing(run), says=text, tokenizer=chat_tokenizer(HERMES))
    assert found.outcome == Score(0.0) and not ran and found.counts == {}


async def test_ten_thousand_calls_that_run_are_counted() -> None:
    async def note() -> str:
        """Note."""
        return "noted"

    async def run(task: Task, chat: Chat) -> Any:
        await chat.reply("hello")
        tools = ToolSet([tidemill.tool(note)])
        await tools.results([called("note" if n % 2 else "nothing") for n in range(10_000)])
        return Score(0.0)

    found = await attempt(Playing(run))
    assert found.outcome == Score(0.0) and found.counts == {"tools/calls": 10_000, "tools/malformed": 5_000}
