"""Tools of MCP servers, and servers that are killed, frozen or lying: never a hang, never an exception of another kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp")

from scripted_chat import ScriptedChat, call, saying

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.tools import mcp_server as module
from tidemill.tools import mcp_session
from tidemill.tools.mcp_server import McpServer
from tidemill.tools.tool_set import ToolSet
from tidemill.tools.work_loop import work

pytestmark = pytest.mark.runs  # a server takes seconds to start
HERE = Path(__file__).parent
DEMO = [sys.executable, str(HERE / "mcp_demo_server.py"), "stdio"]


def liar(how: str) -> list[str]:
    return [sys.executable, str(HERE / "mcp_lying_server.py"), how]


@contextlib.asynccontextmanager
async def serving(*command: str, **options: Any) -> AsyncIterator[McpServer]:
    server = McpServer(list(command), **options) if command else McpServer(**options)
    try:
        yield server
    finally:
        await server.close()


async def said(tools: ToolSet, name: str, /, **arguments: Any) -> str:
    return (await tools.result(call(name, arguments))).content


async def test_tools_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    async with serving(*DEMO, env={"NAMED": "y"}) as server:
        tools = ToolSet(await server.tools())
        schema = next(each["function"] for each in tools.schemas if each["function"]["name"] == "add")
        assert schema["description"] == "Add two numbers" and schema["parameters"]["required"] == ["a", "b"]
        assert await said(tools, "add", a=2, b=3) == "5"
        assert await said(tools, "greet", name="you", style="formal") == "Good day, you"
        names = set((await said(tools, "environment")).split("\n"))
        assert "NAMED" in names and "PATH" in names and "SECRET_TOKEN" not in names
        assert (await tools.result(call("add", {"a": "x", "b": 3}))).fault == "malformed"
        failed = await tools.result(call("fail"))
        assert failed.fault == "error" and failed.content.startswith("error: fail: ") and "no such thing" in failed.content
        assert "Traceback" not in failed.content
        big = await said(tools, "write", size=100_000)
        assert big.startswith("x" * 16_384 + "\n[cut after 16384 of 100000")
        found = await tools.results([call("add", {"a": n, "b": 1}) for n in range(20)])
        assert [each.content for each in found] == [str(n + 1) for n in range(20)]
        chat = ScriptedChat(saying("", call("add", {"a": 20, "b": 22})), lambda seen: seen[-1]["content"])
        assert (await work(chat, "20 + 22?", await server.tools(only=["add"]))).text == "42"
        assert len(chat.options[0]["tools"]) == 1
        with pytest.raises(ConfigError, match="has no tool 'nothing': expected add, greet"):
            await server.tools(only=["nothing"])


async def test_structured_results_and_pages_of_tools() -> None:
    async with serving(sys.executable, str(HERE / "mcp_record_server.py"), prefix="city/") as server:
        tools = ToolSet(await server.tools())
        assert list(tools.tools) == ["city_weather", "city_picture", "city_empty"]
        assert await said(tools, "city_weather", city="Oslo") == '{"degrees": 21.5, "city": "Oslo"}'
        assert await said(tools, "city_weather", city="Paris") == (
            'error: city_weather: the argument \'city\' is "Paris": expected one of ["Oslo", "Rome"]'
        )
        assert await said(tools, "city_picture", city="Rome") == "It is pretty:\n[image]"
        assert await said(tools, "city_empty", city="Rome") == "error: city_empty: no"


async def test_a_server_that_ends_is_started_again() -> None:
    async with serving(*DEMO) as server:
        tools = ToolSet(await server.tools())
        first = int(await said(tools, "pid"))
        with pytest.raises(tidemill.ToolUnavailable, match=r"exit status 7; its last words: these are my last words"):
            await tools.results([call("die"), call("wait"), call("wait")])
        second = int(await said(tools, "pid"))
        assert second != first
        os.kill(second, signal.SIGKILL)
        with contextlib.suppress(tidemill.ToolUnavailable):
            await said(tools, "add", a=1, b=1)  # it may not have been heard of yet
        assert await said(tools, "add", a=1, b=1) == "2"


async def test_what_a_server_started_ends_with_it() -> None:
    async with serving(*DEMO) as server:
        tools = ToolSet(await server.tools())
        own, child = [psutil.Process(int(await said(tools, name))) for name in ("pid", "child")]
    await gone(own, child)


async def gone(*processes: psutil.Process) -> None:
    async with asyncio.timeout(30):
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            await asyncio.sleep(0.01)


async def test_a_slow_tool_is_late_and_its_server_lives() -> None:
    async with serving(*DEMO) as server:
        tools = ToolSet(await server.tools())
        before = await said(tools, "pid")
        server._limit_s = 0.3
        late = await tools.result(call("wait"))
        server._limit_s = 30.0
        assert late.content == "error: wait: gave no result within 0.3 s" and late.fault == "late"
        assert await said(tools, "pid") == before and tools.counts["wait"].late == 1


async def test_a_frozen_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "CHECK_S", 0.3)
    async with serving(*DEMO) as server:
        tools = ToolSet(await server.tools())
        frozen = psutil.Process(int(await said(tools, "pid")))
        server._limit_s = 0.3
        assert (await tools.result(call("freeze"))).fault == "late"
        server._limit_s = 30.0
        assert int(await said(tools, "pid")) != frozen.pid
        await gone(frozen)


LIES = {
    "half": "late",
    "garbage": "after all",
    "endless line": "sent a line of more than 65,536 bytes",
    "endless lines": "late",
    "wrong result": "ValidationError",
    "wrong id": "late",
    "closes": "closed its stdout",
    "deaf": "late",
    "error": "broken",
}


@pytest.mark.parametrize("how", LIES)
async def test_a_lying_server(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(mcp_session, "CHECK_S", 0.3)
    async with serving(*liar(how), limit_s=1.0 if LIES[how] == "late" else 60.0) as server:
        tools = ToolSet(await server.tools())
        async with asyncio.timeout(60):
            try:
                found = await tools.result(call("lie"))
                assert LIES[how] in (found.content, found.fault)
            except tidemill.ToolUnavailable as error:
                assert LIES[how] in str(error) and "MCP server" in str(error)


@pytest.mark.parametrize(("how", "reason"), [("silent", "was not ready within 0.5 s"), ("ends at once", "I cannot start")])
async def test_a_server_that_does_not_start(how: str, reason: str) -> None:
    async with serving(*liar(how), start_s=0.5 if how == "silent" else 60) as server:
        with pytest.raises(tidemill.ToolUnavailable, match=reason):
            await server.tools()


async def test_an_endless_list_of_tools_ends() -> None:
    async with serving(*liar("endless list")) as server:
        assert len(await server.tools()) == mcp_session.MOST_PAGES


async def test_restarts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    opened = McpServer._connected
    monkeypatch.setattr(McpServer, "_connected", lambda self, ended: starts.append(1) or opened(self, ended))
    async with serving(*DEMO, restarts=1) as server:
        tools = ToolSet(await server.tools())
        for _ in range(4):
            with pytest.raises(tidemill.ToolUnavailable):
                await tools.result(call("die"))
        assert len(starts) == 2
        with pytest.raises(tidemill.ToolUnavailable, match="failed 2 times in a row; at last it ended: exit"):
            await tools.result(call("add", {"a": 1, "b": 1}))
        monkeypatch.setattr(module, "RETRY_S", 0.0)
        assert await said(tools, "add", a=1, b=1) == "2"
        monkeypatch.undo()


async def test_sessions_are_processes_and_are_shared() -> None:
    async with serving(*DEMO, sessions=2) as server:
        tools = ToolSet(await server.tools())
        found = await tools.results([call("pid") for _ in range(6)])
        assert len({each.content for each in found}) == 2


def test_a_server_outlives_no_event_loop() -> None:
    server = McpServer(DEMO)
    pids = list[int]()

    async def one() -> None:
        tools = ToolSet(await server.tools())
        pids.append(int(await said(tools, "pid")))

    asyncio.run(one())
    asyncio.run(one())
    assert len(set(pids)) == 2
    asyncio.run(gone_by_id(*pids))


async def gone_by_id(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            await gone(psutil.Process(pid))


# --- over HTTP -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def demo_url() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = await asyncio.create_subprocess_exec(sys.executable, DEMO[1], str(port), stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"running on" not in await process.stderr.readline():
                pass
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.wait(), 60)


async def test_tools_over_http() -> None:
    async with demo_url() as (url, process), serving(url=url) as server:
        tools = ToolSet(await server.tools())
        assert await said(tools, "add", a=2, b=3) == "5"
        assert (await tools.result(call("fail"))).fault == "error"
        server._limit_s = 0.3
        assert (await tools.result(call("wait"))).fault == "late"
        server._limit_s = 30.0
        process.kill()
        with pytest.raises(tidemill.ToolUnavailable, match=f"MCP server {url}"):
            await tools.result(call("add", {"a": 1, "b": 1}))


Answer = Callable[[dict[str, Any]], bytes]


def http(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def lying_url(on_call: Any) -> AsyncIterator[str]:
    """A server that speaks MCP over HTTP until a tool is called; `on_call` writes what comes then."""
    import json

    from mcp_lying_content import OPENS, TOOL

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0)
                asked = json.loads(await reader.readexactly(size) or b"{}")
                known = {"initialize": OPENS, "tools/list": {"tools": [TOOL]}}.get(asked.get("method"))
                if known is not None:
                    writer.write(http(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": known}).encode()))
                elif asked.get("method") == "tools/call":
                    await on_call(asked["id"], writer)
                elif "id" in asked:
                    error = {"code": -32601, "message": "no"}
                    writer.write(http(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}).encode()))
                else:
                    writer.write(http(b"", status="202 Accepted"))
                await writer.drain()
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}/mcp"
    finally:
        served.close()


async def wrong_type(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(http(b"<html>hello</html>", "text/html"))


async def half_json(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(http(b'{"jsonrpc": "2.0", "id"'))


async def cut_body(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(http(b'{"jsonrpc": "2.0"}').replace(b"length: 18", b"length: 500"))
    writer.close()


async def huge_body(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999999999999\r\n\r\n")
    while True:
        writer.write(b" " * (1 << 16))
        await writer.drain()


async def huge_event(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
    while True:
        writer.write(b"x" * (1 << 16))
        await writer.drain()


async def bomb(number: Any, writer: asyncio.StreamWriter) -> None:
    import gzip

    writer.write(http(gzip.compress(b" " * (50 << 20), 1), more="content-encoding: gzip\r\n"))


async def broken(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(http(b"oops", "text/plain", "502 Bad Gateway"))


async def elsewhere(number: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(http(b"", status="307 Temporary Redirect", more="location: http://127.0.0.1:1/mcp\r\n"))


async def silent(number: Any, writer: asyncio.StreamWriter) -> None:
    return None


HTTP_LIES = {
    wrong_type: "Unexpected content type: text/html",
    half_json: "JSON",
    cut_body: "",
    huge_body: "a response of more than 65,536 bytes",
    huge_event: "SSE",
    bomb: "compressed",
    broken: "Server returned an error response",
    elsewhere: "Redirect to http://127.0.0.1:1/mcp not followed",
    silent: "late",
}


@pytest.mark.parametrize("lie", HTTP_LIES, ids=lambda lie: lie.__name__)
async def test_a_lying_server_over_http(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(mcp_session, "CHECK_S", 0.3 if lie is silent else 60.0)
    async with lying_url(lie) as url, serving(url=url, limit_s=1.0 if lie is silent else 60.0) as server:
        tools = ToolSet(await server.tools())
        memory = psutil.Process().memory_info().rss
        async with asyncio.timeout(60):
            try:
                assert (await tools.result(call("lie"))).fault == HTTP_LIES[lie]
            except tidemill.ToolUnavailable as error:
                assert HTTP_LIES[lie] in str(error)
        assert psutil.Process().memory_info().rss - memory < 40 << 20


async def test_what_is_no_server() -> None:
    async with serving(url="http://127.0.0.1:1/mcp") as server:
        with pytest.raises(tidemill.ToolUnavailable, match="ConnectError"):
            await server.tools()
    for options, sentence in (
        ({"command": ["no-such-command"]}, "'no-such-command' is not found"),
        ({}, "expected a command as a list of texts, or url"),
        ({"command": DEMO, "url": "http://x"}, "and not both"),
        ({"command": DEMO, "sessions": 0}, "expected numbers above 0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            McpServer(**options)
