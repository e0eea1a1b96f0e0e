"""Whatever an agent's library or a hostile one sends: retries, clients that leave, wrong keys, floods, and the end."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from gateway.recording_chat import HELLO, RecordingChat, http, said
from openai import AsyncOpenAI

from tidemill.gateway import episode_calls, gateway
from tidemill.gateway.gateway import serve_chat

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": HELLO}
RETRY = {"x-stainless-retry-count": "1"}


async def test_a_retry_gets_the_same_answer_and_nothing_is_sampled_again() -> None:
    numbers = iter(range(100))
    chat = RecordingChat(lambda messages: said(str(next(numbers))))
    async with serve_chat(chat) as model, http(model) as client:
        first = (await client.post(CHAT, json=BODY)).json()
        again = (await client.post(CHAT, json=BODY, headers=RETRY)).json()
        assert again == first
        meant = (await client.post(CHAT, json=BODY)).json()  # asked twice on purpose
        other = (await client.post(CHAT, json=BODY | {"n": 1}, headers=RETRY)).json()  # another body
        named = [(await client.post(CHAT, json=BODY, headers={"idempotency-key": key})).json() for key in "aab"]
        texts = [each["choices"][0]["message"]["content"] for each in (first, meant, other, *named)]
        assert texts == ["0", "1", "2", "3", "3", "4"]
        assert (model.counts["calls"], model.counts["retries"]) == (5, 2)


async def test_the_library_itself_tries_again_after_a_lost_connection() -> None:
    """The first client's connection breaks while its reply is sampled: the second attempt gets that reply."""
    chat = RecordingChat()
    chat.gate = asyncio.Event()

    class Broken(httpx.AsyncHTTPTransport):
        lost = False

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.lost:
                chat.gate.set()
                return await super().handle_async_request(request)
            self.lost = True
            sent = asyncio.ensure_future(super().handle_async_request(request))
            await chat.count(1)
            sent.cancel()
            await asyncio.wait({sent}, timeout=30)
            raise httpx.ReadError("the connection was lost")

    async with serve_chat(chat) as model, httpx.AsyncClient(transport=Broken()) as transport:
        client = AsyncOpenAI(base_url=model.url, api_key=model.key, max_retries=2, http_client=transport)
        reply = await client.chat.completions.create(**BODY)
        assert reply.choices[0].message.content == "to hello"
        assert len(chat.asked) == 1 and not chat.cancelled
        assert (model.counts["calls"], model.counts["retries"]) == (1, 1)


async def test_who_sends_the_same_while_the_first_still_waits_gets_a_reply_of_its_own() -> None:
    numbers = iter(range(100))
    chat = RecordingChat(lambda messages: said(str(next(numbers))))
    chat.gate = asyncio.Event()
    async with serve_chat(chat) as model, http(model) as client:
        both = [asyncio.ensure_future(client.post(CHAT, json=BODY)) for _ in range(2)]
        await chat.count(2)
        third = asyncio.ensure_future(client.post(CHAT, json=BODY, headers=RETRY))  # joins one of them
        while model.counts["retries"] < 1:
            await asyncio.sleep(0.001)
        both[0].cancel()
        chat.gate.set()
        texts = {(await each).json()["choices"][0]["message"]["content"] for each in (both[1], third)}
        assert texts <= {"0", "1"} and len(chat.asked) == 2


async def test_a_client_that_leaves_ends_its_call_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_calls, "LINGER_S", 0.01)
    chat = RecordingChat()
    chat.gate = asyncio.Event()
    async with serve_chat(chat) as model, http(model) as client:
        asked = asyncio.ensure_future(client.post(CHAT, json=BODY))
        await chat.count(1)
        asked.cancel()
        async with asyncio.timeout(30):
            while not model.counts["abandoned"]:
                await asyncio.sleep(0.001)
        chat.gate.set()
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert len(chat.asked) == 2 and chat.cancelled == 1


async def test_the_end_of_the_episode_ends_calls_and_key() -> None:
    chat = RecordingChat()
    chat.gate = asyncio.Event()
    async with serve_chat(RecordingChat()) as other, http(other) as client:
        async with serve_chat(chat) as model:
            late = {"authorization": f"Bearer {model.key}"}
            asked = asyncio.ensure_future(client.post(CHAT, json=BODY, headers=late))
            await chat.count(1)
        ended = await asked
        assert ended.status_code == 410 and "over" in ended.json()["error"]["message"]
        assert chat.cancelled == 1 and not chat.under_way
        refused = await client.post(CHAT, json=BODY, headers=late)
        assert refused.status_code == 401 and "ended" in refused.json()["error"]["message"]
        assert len(chat.asked) == 1
    with pytest.raises(httpx.ConnectError):
        async with http(other) as client:
            await client.get("/v1/models")
    assert not gateway._servers


async def test_a_request_is_its_keys_and_no_other_key_is_taken() -> None:
    chats = [RecordingChat(lambda messages, i=i: said(f"episode {i}")) for i in range(2)]
    async with serve_chat(chats[0]) as one, serve_chat(chats[1]) as two:
        assert one.url == two.url and one.key != two.key
        for model, text in ((one, "episode 0"), (two, "episode 1")):
            for headers in ({"authorization": f"Bearer {model.key}"}, {"x-api-key": model.key}):
                async with http(model, key="x") as client:
                    reply = await client.post(CHAT, json=BODY, headers={"authorization": "", **headers})
                    assert reply.json()["choices"][0]["message"]["content"] == text
        name = one.key.rpartition("-")[0]
        for wrong in ("", "x", "-", "--", name, f"{name}-", f"{name}-{two.key.rpartition('-')[2]}", one.key[:-1]):
            async with http(one, key="x") as client:
                client.headers["authorization"] = ""
                client.headers["x-api-key"] = wrong
                for refused in (await client.post(CHAT, json=BODY), await client.get("/v1/models")):
                    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert [len(chat.asked) for chat in chats] == [2, 2]


async def test_budget_and_deadline_end_the_replies() -> None:
    async with serve_chat(RecordingChat(), tokens=10) as model, http(model) as client:
        statuses = [(await client.post(CHAT, json=BODY)).status_code for _ in range(3)]
        told = (await client.post(CHAT, json=BODY)).json()["error"]
        assert statuses == [200, 200, 410] and "10 tokens" in told["message"]  # 8 tokens each
    chat = RecordingChat()
    chat.gate = asyncio.Event()
    async with serve_chat(chat, deadline_s=0.01) as model, http(model) as client:
        for _ in range(2):
            late = await client.post(CHAT, json=BODY)
            assert late.status_code == 410 and "0.01 s are over" in late.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "m", "messages": "', 400),
        (b'{"model": "\xff"}', 400),
        (json.dumps(BODY | {"messages": [{"role": "user", "content": "\ud800"}]}).encode(), 400),
        (json.dumps(BODY).encode()[:-1] + b',"pad":"' + b"a" * (9 << 20) + b'"}', 413),
        (b'{"model":"m","messages":[' + b"[" * 200_000, 413),
        (json.dumps(BODY | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}).encode(), 200),
        (b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f",'
         b'"parameters":' + b'{"a":' * 100 + b"1" + b"}" * 103 + b"]}", 400),
        (json.dumps(BODY | {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}).encode(), 200),
    ],
)  # fmt: skip
async def test_a_body_of_any_kind_has_an_answer(raw: bytes, status: int) -> None:
    chat = RecordingChat()
    async with serve_chat(chat) as model, http(model) as client:
        for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
            reply = await client.post(CHAT, content=raw, headers={"content-type": kind})
            assert reply.status_code == status, reply.text
            assert status == 200 or reply.json()["error"]["message"]
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert len(chat.asked) == 1 + (3 if status == 200 else 0)


async def test_a_body_that_does_not_come_to_its_end_keeps_nobody_waiting() -> None:
    async with serve_chat(RecordingChat()) as model, http(model) as client:
        port = int(model.anthropic_url.rpartition(":")[2])
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {model.key}\r\ncontent-length: 99\r\n\r\n"
        halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for half in halves:
            half.sendall(head.encode() + b'{"model": "m", "mess')
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        for half in halves[:10]:
            half.close()
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    for half in halves:
        half.close()


@pytest.mark.runs
async def test_there_are_not_more_calls_at_a_time_than_the_chat_takes() -> None:
    chat = RecordingChat()
    chat.gate = asyncio.Event()
    async with serve_chat(chat) as model, http(model) as client:
        client.timeout = 120  # type: ignore[assignment]
        client._transport._pool._max_connections = 400  # type: ignore[attr-defined]
        asked = [asyncio.ensure_future(client.post(CHAT, json=BODY | {"user": str(i)})) for i in range(300)]
        await chat.count(episode_calls.AT_ONCE)
        async with asyncio.timeout(60):
            while model.counts["refused"] < 300 - episode_calls.MOST_CALLS:
                await asyncio.sleep(0.001)
        chat.gate.set()
        statuses = [(await each).status_code for each in asked]
        assert statuses.count(200) == episode_calls.MOST_CALLS == 256 and statuses.count(429) == 44
        assert chat.most == episode_calls.AT_ONCE == 128


async def test_answered_calls_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_calls, "MOST_KEPT", 5_000)
    chat = RecordingChat(lambda messages: said("x" * 900))
    async with serve_chat(chat) as model, http(model) as client:
        for i in range(20):
            await client.post(CHAT, json=BODY | {"user": str(i)})
        calls = model._calls
        assert 3 <= len(calls._calls) <= 5 and calls._kept <= 5_000
        await client.post(CHAT, json=BODY | {"user": "19"}, headers=RETRY)
        assert len(chat.asked) == 20
        await client.post(CHAT, json=BODY | {"user": "0"}, headers=RETRY)  # too long ago: it is sampled anew
        assert len(chat.asked) == 21


@pytest.mark.runs
async def test_two_hundred_episodes_at_once_each_have_their_own_replies() -> None:
    async def episode(number: int) -> dict[str, Any]:
        chat = RecordingChat(lambda messages: said(f"{number}: {messages[-1]['content']}"))
        async with serve_chat(chat) as model:
            client = AsyncOpenAI(base_url=model.url, api_key=model.key, timeout=120, http_client=shared)
            for turn in range(5):
                reply = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"turn {turn}"}]
                )
                assert reply.choices[0].message.content == f"{number}: turn {turn}"
            return model.counts

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as shared:
        counts = await asyncio.gather(*(episode(number) for number in range(200)))
    assert all(each["calls"] == 5 and not each["refused"] for each in counts)
    assert not gateway._servers


async def many(url: str, key: str, number: int) -> list[int]:
    """The statuses of so many calls over one connection, one after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    statuses = []
    for i in range(number):
        raw = json.dumps(BODY | {"user": str(i)}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        answer = await reader.readuntil(b"\r\n\r\n")
        statuses.append(int(answer.split()[1]))
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    return statuses


@pytest.mark.runs
async def test_ten_thousand_calls_of_one_client_are_answered_and_other_episodes_go_on() -> None:
    chat = RecordingChat()
    async with serve_chat(chat) as model, serve_chat(RecordingChat()) as other:
        flood = [asyncio.ensure_future(many(model.anthropic_url, model.key, 100)) for _ in range(100)]
        async with http(other) as beside:
            assert (await beside.post(CHAT, json=BODY)).status_code == 200
        statuses = [status for each in flood for status in await each]
        assert statuses == [200] * 10_000 == [200] * len(chat.asked)


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gateway.importlib.util.find_spec
    monkeypatch.setattr(gateway.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ValueError, match=r"pip install 'tidemill\[serve\]'"):
        async with serve_chat(RecordingChat()):
            pass


async def test_the_usual_variables_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    async with serve_chat(RecordingChat()) as model:
        assert model.environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
        for name, value in model.environment.items():
            monkeypatch.setenv(name, value)
        async with AsyncOpenAI() as client:
            reply = await client.chat.completions.create(model=model.model, messages=HELLO)
        assert reply.choices[0].message.content == "to hello"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
        async with AsyncOpenAI(max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no episode has this API key"):
                await client.chat.completions.create(model=model.model, messages=HELLO)
