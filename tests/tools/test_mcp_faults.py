"""What an attempt is, and counts, when its MCP server is killed, stopped, slow or lying.

See the table in `reliability/test_fault_table.py`. What the server's caller is told is in `test_mcp_server.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from envs.one_attempt import Attempt, Playing, attempt, gone, happens, leaves_nothing, stopped
from scripted_chat import call

from tidemill.core.chat_interface import Chat
from tidemill.core.types import InfraError, Score, Task
from tidemill.tools import mcp_session
from tidemill.tools.mcp_server import McpServer
from tidemill.tools.tool_set import ToolSet

pytestmark = pytest.mark.runs
HERE = Path(__file__).parent
DEMO = [sys.executable, str(HERE / "mcp_demo_server.py"), "stdio"]
PLAIN = [sys.executable, str(HERE / "mcp_lying_server.py")]


async def played(command: list[str], then: Any, limit_s: float = 60.0) -> Attempt:
    """An attempt that asks the policy once and then does as it is told with the server's tools."""
    server = McpServer(command, limit_s=limit_s)

    async def run(task: Task, chat: Chat) -> Any:
        await chat.reply("hello")
        await then(server, ToolSet(await server.tools()))
        return Score(0.5)

    with leaves_nothing():
        try:
            return await attempt(Playing(run))
        finally:
            await server.close()


async def test_a_killed_server() -> None:
    pids = list[int]()

    async def then(server: McpServer, tools: ToolSet) -> None:
        pids.append(int((await tools.result(call("pid"))).content))
        os.kill(pids[0], signal.SIGKILL)
        await happens(lambda: gone(pids[0]))
        for _ in range(2):  # the first call may find that it has ended, and start it again
            await tools.result(call("die"))

    found = await played(DEMO, then)
    assert isinstance(found.outcome, InfraError) and "MCP server" in found.outcome.reason
    assert found.counts["tools/unavailable"] == 1 and found.counts["mcp/lost"] in (1, 2)


async def test_a_frozen_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "CHECK_S", 0.3)
    pids = list[int]()

    async def then(server: McpServer, tools: ToolSet) -> None:
        pids.append(int((await tools.result(call("pid"))).content))
        os.kill(pids[0], signal.SIGSTOP)
        await happens(lambda: stopped(pids[0]))
        server._limit_s = 0.3
        assert (await tools.result(call("add", {"a": 1, "b": 2}))).fault == "late"
        server._limit_s = 60.0
        assert (await tools.result(call("add", {"a": 1, "b": 2}))).content == "3"

    found = await played(DEMO, then)
    assert found.outcome == Score(0.5) and gone(pids[0])
    assert found.counts == {"tools/calls": 3, "tools/late": 1, "mcp/lost": 1}


async def test_a_slow_server() -> None:
    async def then(server: McpServer, tools: ToolSet) -> None:
        await tools.result(call("add", {"a": 1, "b": 2}))  # it is up
        server._limit_s = 0.3
        assert (await tools.result(call("wait"))).fault == "late"

    found = await played(DEMO, then)
    assert found.outcome == Score(0.5) and found.counts == {"tools/calls": 2, "tools/late": 1}


@pytest.mark.parametrize("lie", ["wrong result", "endless line", "closes"])
async def test_a_lying_server_makes_no_score(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.tools import mcp_server

    monkeypatch.setattr(mcp_server, "MOST_BYTES", 1 << 16)

    async def then(server: McpServer, tools: ToolSet) -> None:
        await tools.result(call("lie"))

    found = await played([*PLAIN, lie], then)
    assert isinstance(found.outcome, InfraError) and "MCP server" in found.outcome.reason
    assert found.counts["tools/calls"] == found.counts["tools/unavailable"] == 1


async def test_half_an_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "CHECK_S", 0.3)

    async def then(server: McpServer, tools: ToolSet) -> None:
        server._limit_s = 0.5
        assert (await tools.result(call("lie"))).fault == "late"

    found = await played([*PLAIN, "half"], then)
    assert found.outcome == Score(0.5) and found.counts["tools/late"] == 1


async def test_ten_thousand_answers_to_one_call() -> None:
    async def then(server: McpServer, tools: ToolSet) -> None:
        assert (await tools.result(call("lie"))).content == "the first"
        assert (await tools.result(call("lie"))).content == "the first", "what came too often answers no later call"

    found = await played([*PLAIN, "ten thousand answers"], then)
    assert found.outcome == Score(0.5) and found.counts == {"tools/calls": 2}
