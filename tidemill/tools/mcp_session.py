"""One connection to an MCP server: opened by a task of its own, used by many calls, closed when it fails.

the tool answers with an error, or refuses the arguments   an observation: ToolError
it gives no result in time                                 an observation: ToolError, late; a server that is silent
                                                           altogether is then ended, and replaced
the connection ends, or what comes is no MCP               ToolUnavailable
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from tidemill.core.errors import ConfigError, ToolError, ToolUnavailable
from tidemill.core.outcomes import clip

CHECK_S = 5.0  # for a server to answer anything after a call was late
CLOSE_S = 20.0  # for a connection to close: more than its process takes to be killed
MOST_PAGES = 100  # of a list of tools

Connect = Callable[[Callable[[str], None]], AbstractAsyncContextManager[tuple[Any, Any]]]


class McpSession:
    """A connection. `ended` says why it is of no use any more; "" while it opens and works."""

    def __init__(self, title: str, connect: Connect) -> None:
        """title: names the server in errors. connect: gives the streams; it is passed what hears that the server ended."""
        self.title, self.ended, self.busy = title, "", 0
        self._connect, self._client, self._stop = connect, None, asyncio.Event()
        self._listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold())  # the SDK wants one task to open, hold and close a connection
        self._task.add_done_callback(self._done)

    async def tools(self, limit_s: float) -> list[Any]:
        """The server's tools, once the connection is open. Raises ToolUnavailable if it is not within `limit_s`."""
        await asyncio.wait({self._listed}, timeout=limit_s)
        if not self._listed.done():
            self.fail(f"was not ready within {limit_s:g} s")
        if self.ended:
            raise self._unavailable()
        return self._listed.result()

    async def call(self, name: str, arguments: Mapping[str, Any], limit_s: float) -> str:
        """The text of a tool's result. Raises ToolError and ToolUnavailable."""
        from mcp import MCPError  # pyright: ignore[reportMissingImports]
        from mcp.types import (  # pyright: ignore[reportMissingImports]
            CONNECTION_CLOSED,
            INVALID_PARAMS,
            METHOD_NOT_FOUND,
        )

        assert self._client is not None, "await `tools` first"
        try:
            async with asyncio.timeout(limit_s):
                result = await self._client.call_tool(name, dict(arguments))
        except TimeoutError:
            if not self.ended and not await self._answers():
                self.fail("does not answer any more")
            raise ToolError(f"gave no result within {limit_s:g} s", "late") from None
        except MCPError as error:
            if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                raise ToolError(clip(str(error))) from None
            # The dispatcher's own text: other requests may go on after "SSE stream ended without a response".
            if error.code == CONNECTION_CLOSED and str(error) == "Connection closed" and not self.ended:
                await asyncio.wait({self._task}, timeout=CHECK_S)  # the cause is known when everything has ended
            raise self._unavailable(f"{name}: {clip(str(error))}") from None
        except Exception as error:  # what the SDK makes of a server that does not keep to the protocol
            raise self._unavailable(f"{name}: {type(error).__name__}: {clip(str(error))}") from None
        if result.is_error:
            raise ToolError(result_text(result))
        return result_text(result)

    def fail(self, reason: str) -> None:
        """Give the connection up, for the first reason given, and end the server's process."""
        self.ended = self.ended or reason
        self._stop.set()
        if self._client is None:  # it is still opening
            self._task.cancel()

    @property
    def over(self) -> bool:
        """True once nothing of it is left."""
        return self._task.done()

    async def close(self) -> None:
        self.fail("was closed")
        await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def _hold(self) -> None:
        """Open the connection, and hold it until it fails or is closed."""
        from mcp import Client  # pyright: ignore[reportMissingImports]

        async with Client(self._connect(self.fail), cache=None) as client:
            found, cursor = list[Any](), None
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                found, cursor = [*found, *page.tools], page.next_cursor
                if not cursor:
                    break
            self._client = client
            self._listed.set_result(found)
            await self._stop.wait()  # bounded: `fail` sets it

    def _done(self, task: asyncio.Task[None]) -> None:
        """Note why the connection ended, and let those who wait for it know."""
        error = None if task.cancelled() else task.exception()
        self.ended = self.ended or ("closed the connection" if error is None else described(error))
        if not self._listed.done():
            self._listed.set_result([])

    async def _answers(self) -> bool:
        """True if the server still answers something."""
        assert self._client is not None
        try:
            async with asyncio.timeout(CHECK_S):
                await self._client.list_tools()
        except Exception:
            return False
        return True

    def _unavailable(self, why: str = "") -> ToolUnavailable:
        return ToolUnavailable(f"{self.title} {self.ended}" if self.ended else f"{self.title}, {why}")


def result_text(result: Any) -> str:
    """A result's blocks as text; a block that is no text is named."""
    texts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def described(error: BaseException) -> str:
    """The first cause in what a group of tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"failed: {type(error).__name__}: {clip(str(error))}"


def expect_sdk() -> None:
    """Raise ConfigError unless the SDK is installed."""
    try:
        import mcp  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("McpServer needs a package that is not installed: pip install 'tidemill[mcp]'") from None
