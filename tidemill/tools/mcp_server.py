"""McpServer: the tools of an MCP server, started once for each worker process and shared by its episodes."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from tidemill.core.episode_counts import counted
from tidemill.core.errors import ConfigError, ToolUnavailable
from tidemill.tools.function_tool import Tool
from tidemill.tools.mcp_http import http_streams
from tidemill.tools.mcp_session import CHECK_S, McpSession, expect_sdk
from tidemill.tools.mcp_stdio import stdio_streams

RETRY_S = 30.0  # after too many failures in a row, one more is tried so often
MOST_BYTES = 16 << 20  # of one message of a server
_MARGIN_S = 5.0  # a call ends by its own limits, before that of the ToolSet around it


class McpServer:
    """An MCP server, as a command that speaks over stdin and stdout, or at a URL.

        files = McpServer(["npx", "-y", "@modelcontextprotocol/server-filesystem", "/data"], sessions=2)
        tools = ToolSet(await files.tools())

    Its sessions are shared: a tool must not expect that one episode's calls come to one session.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        sessions: int = 1,
        limit_s: float = 30.0,
        start_s: float = 60.0,
        restarts: int = 3,
        prefix: str = "",
    ) -> None:
        """env: added to the few variables that a server inherits. headers: of each request to `url`.

        sessions: connections, and processes of a command. limit_s: of one call. start_s: until a session is open. restarts:
        failures in a row, after which calls fail at once, but for a trial every 30 seconds. prefix: of the tools' names.
        Raises ConfigError for a command that is not found.
        """
        expect_sdk()
        if bool(command) == bool(url) or isinstance(command, str):
            raise ConfigError("McpServer: expected a command as a list of texts, or url = ..., and not both")
        if sessions < 1 or limit_s <= 0 or start_s <= 0 or restarts < 0:
            raise ConfigError(f"McpServer({sessions=}, {limit_s=}, {start_s=}, {restarts=}): expected numbers above 0")
        if command and shutil.which(command[0], path=(env or {}).get("PATH")) is None:
            raise ConfigError(f"McpServer: the command {command[0]!r} is not found: install it, or give its path")
        self.title = f"MCP server {url or command[0]}"
        self._command, self._url, self._env, self._cwd = list(command), url, dict(env or {}), cwd
        self._headers, self._most, self._prefix = dict(headers or {}), sessions, prefix
        self._limit_s, self._start_s, self._restarts = limit_s, start_s, restarts
        self._sessions: list[McpSession] = []
        self._ending: list[McpSession] = []  # that have failed, and whose processes are being ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures, self._why, self._tried = 0, "", 0.0  # in a row; of the latest one; when it began
        self._tools: list[Tool] | None = None

    async def tools(self, only: Sequence[str] = ()) -> list[Tool]:
        """The server's tools, of which `only` keeps those with these names. Raises ToolUnavailable if it does not start."""
        if self._tools is None:
            found = await self._opened(self._chosen())
            self._tools = [self._tool(each) for each in found]
        names = [each.name for each in self._tools]
        if missing := [name for name in only if name not in names]:
            raise ConfigError(f"{self.title} has no tool {missing[0]!r}: expected {', '.join(names) or 'none'}")
        return [each for each in self._tools if not only or each.name in only]

    async def close(self) -> None:
        """End all sessions and their processes. A later call opens one again."""
        sessions, self._sessions, self._ending = [*self._sessions, *self._ending], [], []
        await asyncio.gather(*(each.close() for each in sessions))

    def _tool(self, described: Any) -> Tool:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self._prefix}{described.name}")[:64]

        async def called(**arguments: Any) -> str:
            return await self._call(described.name, arguments)

        told = {"name": name, "description": described.description or "", "parameters": described.input_schema}
        limit_s = self._start_s + self._limit_s + CHECK_S + _MARGIN_S
        return Tool(name, {"type": "function", "function": told}, called, limit_s, closed=False)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        session = self._chosen()
        session.busy += 1
        try:
            await self._opened(session)
            result = await session.call(name, arguments, self._limit_s)
        finally:
            session.busy -= 1
            self._noted(session)
        self._failures = 0
        return result

    async def _opened(self, session: McpSession) -> list[Any]:
        try:
            return await session.tools(self._start_s)
        finally:
            self._noted(session)

    def _chosen(self) -> McpSession:
        """A session that nobody uses, a new one, or the one that is used least."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # sessions of another loop are gone with it
            self._loop, self._sessions, self._ending = loop, [], []
        for each in list(self._sessions):
            self._noted(each)
        least = min(self._sessions, key=lambda each: each.busy, default=None)
        if least is not None and (not least.busy or len(self._sessions) >= self._most):
            return least
        if self._failures > self._restarts and time.monotonic() - self._tried < RETRY_S:
            raise ToolUnavailable(f"{self.title} failed {self._failures} times in a row; at last it {self._why}")
        self._tried = time.monotonic()
        self._sessions.append(McpSession(self.title, self._connected))
        return self._sessions[-1]

    def _connected(self, ended: Any) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        if self._url:
            return http_streams(self._url, self._headers, self._start_s, MOST_BYTES)
        return stdio_streams(self._command, self._env, self._cwd, MOST_BYTES, ended)

    def _noted(self, session: McpSession) -> None:
        """Leave out a session that has ended, and count it once."""
        if session.ended and session in self._sessions:
            self._sessions.remove(session)
            self._ending = [each for each in (*self._ending, session) if not each.over]
            self._failures, self._why = self._failures + 1, session.ended
            counted("mcp/lost")
