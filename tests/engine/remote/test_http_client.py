"""Calls of a server: what each of its answers, its silence and its end become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine.remote.http_server import Answer, Asked, reply, serving

from tidemill.core.errors import ConfigError, EngineFailed
from tidemill.engine.remote.http_client import ServerClient

LONG_S = 60.0


@asynccontextmanager
async def client_of(answer: Answer, **given: Any) -> AsyncIterator[ServerClient]:
    async with serving(answer) as url:
        client = ServerClient(url, name="the server", **given)
        try:
            yield client
        finally:
            await client.close()


async def echo(asked: Asked) -> bytes:
    body = json.loads(asked.body) if asked.body else None
    return reply([asked.method, asked.path, body, asked.headers.get("authorization")])


async def test_json_goes_there_and_comes_back() -> None:
    async with client_of(echo, key="sesame") as client:
        assert await client.get("/v1/models?all=1", LONG_S) == ["GET", "/v1/models?all=1", None, "Bearer sesame"]
        assert await client.post("/run", {"ids": [1, 2]}, LONG_S) == ["POST", "/run", {"ids": [1, 2]}, "Bearer sesame"]
        assert (await client.post("/run", [], LONG_S))[2] == []
    async with client_of(echo) as client:
        assert (await client.get("/", LONG_S))[3] is None


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b"", "application/json", None),
        (b"", "text/plain", None),
        (b"Cache flushed.", "text/plain; charset=utf-8", "Cache flushed."),
        (b'{"logprob": -Infinity}', "application/json", {"logprob": -float("inf")}),
        (b'{"status": "ok"}', "text/html", {"status": "ok"}),
    ],
)
async def test_replies_of_other_servers(body: bytes, kind: str, expected: Any) -> None:
    async def answer(asked: Asked) -> bytes:
        return reply(body, kind=kind)

    async with client_of(answer) as client:
        assert await client.get("/", LONG_S) == expected


REFUSALS: list[tuple[int, Any, str]] = [
    (400, {"error": {"message": "too long", "type": "x"}}, "too long"),
    (400, {"error": "no such model"}, "no such model"),
    (404, {"object": "error", "message": "no route"}, "no route"),
    (422, {"detail": [{"loc": ["body", "n"], "msg": "n is missing"}]}, "n is missing"),
    (404, {"detail": "Not Found"}, "Not Found"),
    (401, {"error": {"message": "wrong key: sesame"}}, "wrong key: ***"),
    (400, b"<html>\n  bad   gateway</html>", "<html> bad gateway</html>"),
    (400, b"", "Said"),
    (413, b"[" * 100_000, "[" * 400 + "..."),
    (400, {"other": 1}, '{"other": 1}'),
    (400, [], "[]"),
]


@pytest.mark.parametrize(("status", "body", "sentence"), REFUSALS)
async def test_a_refusal_is_a_value_error_with_the_servers_sentence(status: int, body: Any, sentence: str) -> None:
    async def answer(asked: Asked) -> bytes:
        return reply(body, status)

    async with client_of(answer, key="sesame") as client:
        with pytest.raises(ValueError) as error:
            await client.post("/v1/completions", {}, LONG_S)
    assert str(error.value) == f"the server refused POST /v1/completions ({status}): {sentence}"


async def test_a_redirect_says_where_to() -> None:
    async def answer(asked: Asked) -> bytes:
        return reply(b"", 307, location="http://elsewhere/")

    async with client_of(answer) as client:
        with pytest.raises(ValueError, match="sends GET /v1 on to 'http://elsewhere/': give that address"):
            await client.get("/v1", LONG_S)


async def half(asked: Asked) -> None:
    asked.writer.write(reply({"text": "a long reply"})[:-5])


async def gone(asked: Asked) -> None:
    return None


FAILURES: dict[str, tuple[Answer, str]] = {
    "it fails": (lambda asked: asyncio.sleep(0, reply({"error": {"message": "out of sesame"}}, 500)), r"\(500\): out of \*"),
    "it is overloaded": (lambda asked: asyncio.sleep(0, reply(b"busy", 503)), r"failed at POST /run \(503\): busy"),
    "it ends before its reply": (gone, "did not answer POST /run, the connection failed"),
    "it ends within its reply": (half, "did not answer POST /run, the connection failed"),
    "it says what is no JSON": (lambda asked: asyncio.sleep(0, reply(b"{sesame")), r"no JSON: '\{\*\*\*'"),
    "it says what is nested": (lambda asked: asyncio.sleep(0, reply(b"[" * 10**6)), "what is no JSON"),
    "it is no HTTP server": (lambda asked: asyncio.sleep(0, b"220 mail.example ESMTP\r\n\r\n"), "the connection failed"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_server_that_failed_is_told_from_one_that_refuses(case: str) -> None:
    answer, says = FAILURES[case]
    async with client_of(answer, key="sesame") as client:
        with pytest.raises(EngineFailed, match=says) as error:
            await client.post("/run", {}, LONG_S)
    assert "\n" not in str(error.value)


async def test_a_server_that_is_not_there_has_failed() -> None:
    async with serving(echo) as url:
        pass
    client = ServerClient(url, name="the server")
    with pytest.raises(EngineFailed, match="the server did not answer GET /health, the connection failed"):
        await client.get("/health", LONG_S)
    await client.close()


async def silent(asked: Asked) -> bytes:
    return await asyncio.get_running_loop().create_future()


async def trickling(asked: Asked) -> None:
    asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
    while not asked.writer.is_closing():
        asked.writer.write(b" ")
        await asyncio.sleep(0)


@pytest.mark.parametrize("answer", [silent, trickling])
async def test_the_deadline_is_that_of_the_whole_call(answer: Answer) -> None:
    async with client_of(answer) as client:
        with pytest.raises(TimeoutError, match=r"the server did not answer GET /slow within 0\.2 s"):
            await client.get("/slow", 0.2)


async def test_a_cancelled_call_closes_its_connection() -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def answer(asked: Asked) -> None:
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        came.set()
        assert await asked.reader.read() == b""  # its end
        left.set()

    async with client_of(answer) as client:
        call = asyncio.ensure_future(client.get("/", LONG_S))
        async with asyncio.timeout(LONG_S):
            await came.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await left.wait()


async def test_a_reply_has_a_bound() -> None:
    async def answer(asked: Asked) -> bytes:
        return reply({"text": "x" * int(asked.path[1:])})

    async with client_of(answer, most_bytes=1000) as client:
        assert len((await client.get("/900", LONG_S))["text"]) == 900
        with pytest.raises(ValueError, match="answered GET /1000 with more than 1,000 bytes: ask for less at once"):
            await client.get("/1000", LONG_S)


async def test_many_calls_are_asked_at_once() -> None:
    count, all_came, waiting = 150, asyncio.Event(), list[str]()

    async def answer(asked: Asked) -> bytes:
        waiting.append(asked.path)
        if len(waiting) == count:
            all_came.set()
        await all_came.wait()
        return reply(asked.path)

    async with client_of(answer) as client:
        asked = [f"/{i}" for i in range(count)]
        assert await asyncio.gather(*(client.get(path, LONG_S) for path in asked)) == asked


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    answered = asyncio.Event()

    async def answer(asked: Asked) -> None:
        asked.writer.write(reply("ok"))
        answered.set()

    async with client_of(answer) as client:
        for _ in range(3):
            assert await client.post("/", {}, LONG_S) == "ok"
            await asyncio.sleep(0.01)  # the end of the connection arrives


async def test_proxies_are_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(echo) as proxy, client_of(echo) as client:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with client_of(echo) as client:
            assert (await client.get("/here", LONG_S))[1] == "/here"
        monkeypatch.setenv("HTTP_PROXY", proxy)
        other = ServerClient("http://models.example", name="another")
        assert (await other.get("/there", LONG_S))[1] == "http://models.example/there"
        await other.close()


async def test_a_closed_client_fails_what_is_asked() -> None:
    came = asyncio.Event()

    async def answer(asked: Asked) -> bytes:
        came.set()
        return await silent(asked)

    async with client_of(answer) as client:
        call = asyncio.ensure_future(client.get("/", LONG_S))
        async with asyncio.timeout(LONG_S):
            await came.wait()
            await client.close()
            with pytest.raises(EngineFailed):
                await call
        with pytest.raises(EngineFailed, match="after the client was closed"):
            await client.get("/", LONG_S)
        await client.close()


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://h:0x", "http://h:99999", "http://h/?a=1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        ServerClient(url, name="the server")


def test_secrets_are_refused_where_they_would_be_shown() -> None:
    with pytest.raises(ConfigError) as error:
        ServerClient("http://me:sesame@host:1", name="the server")
    assert "sesame" not in str(error.value) and "give a key" in str(error.value)
    with pytest.raises(ConfigError, match="printable ASCII") as error:
        ServerClient("http://host:1", name="the server", key="ses\name")
    assert "ses" not in str(error.value).replace("the server", "")
