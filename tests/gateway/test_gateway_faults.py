"""Gateways whose process is killed or stopped, slow replies, and clients that lie.

See the table in `reliability/test_fault_table.py`. What clients may send is in `test_gateway_robustness.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from envs.one_attempt import Playing, attempt, gone, happens, leaves_nothing
from openai import AsyncOpenAI

from tidemill.core.chat_interface import Chat
from tidemill.core.types import InfraError, Score, Task
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.environment_settings import EnvironmentWorkers
from tidemill.envs.episode_workers import WorkerEnvironment
from tidemill.gateway import gateway

FILE = Path(__file__).parents[1] / "envs" / "environments_of_faults.py"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/chat/completions"


async def by_gateway(task: Task, chat: Chat) -> Any:
    raise AssertionError("it runs in a worker")


def client_of(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False)


@pytest.mark.runs
@pytest.mark.parametrize(("sign", "how"), [("SIGKILL", "killed by SIGKILL"), ("SIGSTOP", "stopped by a signal")])
@pytest.mark.parametrize("times", [1, 2])
async def test_the_process_of_a_gateway_is_killed_or_stopped(sign: str, how: str, times: int, tmp_path: Path) -> None:
    """Once: the attempt is begun anew, and is what it would have been. Twice: it has no score."""
    note, pids = tmp_path / "note", list[int]()
    settings = EnvironmentWorkers(workers=1, limit_s=60.0)
    with leaves_nothing():
        where = f"{FILE}:by_gateway"
        environment = WorkerEnvironment(FunctionEnvironment(by_gateway), where, settings, lambda reason: 0.0)
        try:
            playing = asyncio.ensure_future(attempt(environment, Task("t", "hello", {"note": str(note)})))
            for _ in range(times):
                await happens(note.exists)
                pid, url, key = note.read_text().split()
                note.unlink()
                async with client_of(url, key) as client:
                    assert (await client.post(CHAT, json=BODY)).status_code == 200
                    os.kill(int(pid), signal.Signals[sign])
                    with pytest.raises(httpx.TransportError):  # a stopped one is killed, and its connections with it
                        await client.post(CHAT, json=BODY)
                pids.append(int(pid))
            if times == 1:
                await happens(note.exists)
                pid, url, key = note.read_text().split()
                async with client_of(url, key) as client:
                    assert (await client.post(CHAT, json=BODY)).status_code == 200
                note.with_suffix(".done").touch()
            found = await playing
        finally:
            await environment.close()
    assert all(map(gone, pids)) and len(set(pids)) == times
    assert found.counts == {"workers/lost": times, "gateway/calls": 2}
    if times == 1:
        assert found.outcome == Score(1.0) and len(found.rows) == 1
    else:
        assert isinstance(found.outcome, InfraError) and how in found.outcome.reason


async def test_a_slow_reply_is_asked_for_again_and_sampled_once() -> None:
    """The library gives up after its own time, and tries again: the reply is the one that was under way."""
    go = asyncio.Event()

    async def run(task: Task, chat: Any) -> Any:
        complete, asked = chat.complete, []

        async def slow(messages: Any, **more: Any) -> Any:
            asked.append(messages)
            await go.wait()
            return await complete(messages, **more)

        chat.complete = slow
        async with chat.serve() as model, httpx.AsyncClient(trust_env=False) as transport:
            how: dict[str, Any] = {"base_url": model.url, "api_key": model.key, "http_client": transport}
            client = AsyncOpenAI(timeout=0.2, max_retries=9, **how)
            waiting = asyncio.ensure_future(client.chat.completions.create(**BODY))
            await happens(lambda: model.counts["retries"] > 0)
            go.set()
            reply = await waiting
        assert reply.choices[0].message.content == "hello" and len(asked) == 1
        return Score(1.0)

    found = await attempt(Playing(run))
    assert found.outcome == Score(1.0) and found.counts.pop("gateway/retries") >= 1
    assert found.counts == {"gateway/calls": 1} and [row.turns for row in found.rows] == [1]


async def test_each_episode_counts_its_own_calls() -> None:
    """Though the server, and so the tasks of its requests, began in the first one."""
    both = asyncio.Barrier(2)

    async def run(task: Task, chat: Chat) -> Any:
        async with chat.serve() as model, client_of(model.url, model.key) as client:
            async with asyncio.timeout(60):
                await both.wait()
            for _ in range(int(task.id)):
                assert (await client.post(CHAT, json=BODY)).status_code == 200
            async with asyncio.timeout(60):
                await both.wait()
        return Score(1.0)

    found = await asyncio.gather(*(attempt(Playing(run), Task(str(number), "hello")) for number in (1, 3)))
    assert [each.counts for each in found] == [{"gateway/calls": 1}, {"gateway/calls": 3}]


async def test_a_lying_client_is_refused_and_counted() -> None:
    raws = [
        (json.dumps(BODY).encode()[:-5], "application/json", 400),
        (b"<html>hello</html>", "text/html", 400),
        (b'{"pad": "' + b"a" * (9 << 20) + b'"}', "application/json", 413),
        (json.dumps(BODY | {"messages": [{"role": "robot", "content": 1}]}).encode(), "application/json", 400),
    ]

    async def run(task: Task, chat: Chat) -> Any:
        async with chat.serve() as model, client_of(model.url, model.key) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            for raw, kind, status in raws:
                answer = await client.post(CHAT, content=raw, headers={"content-type": kind})
                assert answer.status_code == status and answer.json()["error"]["message"]
        return Score(0.5)

    found = await attempt(Playing(run))
    assert found.outcome == Score(0.5)
    assert found.counts == {"gateway/calls": 1, "gateway/refused": len(raws)}


async def test_the_engines_failure_is_no_outcome() -> None:
    async def run(task: Task, chat: Any) -> Any:
        async def fails(messages: Any, **more: Any) -> Any:
            raise RuntimeError("the engine burns")

        chat.complete = fails
        async with chat.serve() as model, client_of(model.url, model.key) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 500
        return Score(1.0)

    found = await attempt(Playing(run))
    assert isinstance(found.outcome, InfraError) and "burns" in found.outcome.reason
    assert found.counts == {"gateway/calls": 1, "gateway/refused": 1} and not gateway._servers


async def test_a_call_that_cannot_be_read_is_counted() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    async def run(task: Task, chat: Chat) -> Any:
        async with chat.serve() as model:
            client = AsyncOpenAI(base_url=model.url, api_key=model.key, max_retries=0)
            reply = await client.chat.completions.create(**BODY, tools=[tool], tool_choice="required")
            assert "half" in (reply.choices[0].message.content or "") and not reply.choices[0].message.tool_calls
            with pytest.raises(openai.BadRequestError, match="without tools"):
                await client.chat.completions.create(**BODY, tool_choice="required")
        return Score(0.0)

    found = await attempt(Playing(run), says='<tool_call>{"name": "f", "argum half')
    assert found.counts == {"gateway/calls": 1, "gateway/faults": 1, "gateway/refused": 1}
