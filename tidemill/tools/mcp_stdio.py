"""MCP over a process's stdin and stdout, with a limit on what it may send, below the keepers of a worker.

    worker -> two keepers -> the server -> whatever it starts

The SDK's own transport keeps a line of any length in memory. Here a server that sends too long a line has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tidemill.core.outcomes import clip
from tidemill.runtime.process_logs import describe
from tidemill.runtime.started_process import started_process
from tidemill.runtime.workers import keeper
from tidemill.runtime.workers.child import MARK_NAME, closed

# Of our environment a server gets these, and what the user names: no token of ours is among them.
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER", MARK_NAME)
DEAF_S = 60.0  # that a server may leave what it was sent unread
POLITE_S = 1.0  # for a server to end by itself when its stdin is closed
KILL_S = 5.0  # for a killed one to be gone
_TAIL = 4096  # bytes of its stderr that are kept to explain a failure
# The package is found without the environment, which is the server's.
_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from tidemill.runtime.workers.kept_command import main; main(*sys.argv[1:])"
)
_ROOT = str(Path(__file__).parents[2])


class McpProcess:
    """A server's process: its pipes, the way it ended, and its end with all that it started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.stdin, self.stdout, self._process = process.stdin, process.stdout, process
        self._tail = bytearray()
        self._draining = asyncio.ensure_future(self._drain(process.stderr))

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], cwd: str | None, most: int) -> McpProcess:
        """Start the command with this environment only. most: bytes of one line of its output."""
        nowhere = os.open(os.devnull, os.O_WRONLY)  # its keepers report its process id, which nobody needs
        try:
            launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, _ROOT, str(os.getpid()), str(nowhere)]
            process = await started_process(
                *(*launch, *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=most,
                env=env,
                cwd=cwd,
                pass_fds=(nowhere,),
            )
        finally:
            os.close(nowhere)
        return cls(process)

    async def ended(self) -> str:
        """The way it ended, with its last words, once it has closed its stdout."""
        code = await self._exited(POLITE_S)
        last = bytes(self._tail).decode(errors="replace").strip().rpartition("\n")[2]
        how = "closed its stdout" if code is None else f"ended: {describe(code)}"
        return how + (f"; its last words: {clip(last)}" if last else "")

    async def close(self) -> None:
        """End it and everything that it has started: politely, then not."""
        self.stdin.close()
        if await self._exited(POLITE_S) is None:
            self._signal(signal.SIGTERM if keeper.KEEPERS else signal.SIGKILL)  # told to, keepers kill all below them
        if await self._exited(KILL_S) is None:  # its keepers are stopped
            self._signal(signal.SIGKILL)
            await self._exited(KILL_S)
        self._draining.cancel()
        await asyncio.wait([self._draining], timeout=KILL_S)
        self._process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
        await closed(self.stdin)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            os.kill(self._process.pid, number)

    async def _exited(self, limit_s: float) -> int | None:
        """Its exit status, or None when it does not end in time: others may hold its pipes, so they say nothing."""
        deadline = time.monotonic() + limit_s
        while self._process.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.returncode

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        # bounded: `close` cancels it
        while chunk := await stderr.read(1 << 16):
            self._tail = (self._tail + chunk)[-_TAIL:]


@asynccontextmanager
async def stdio_streams(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None, most: int, ended: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of a server, as the SDK's transports give them. ended: is told how the server ended, if it does."""
    import anyio  # with the SDK, which needs it

    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    process = await McpProcess.start(command, inherited | dict(env), cwd, most)
    incoming, received = anyio.create_memory_object_stream[Any](0)
    sent, outgoing = anyio.create_memory_object_stream[Any](0)
    reading = asyncio.ensure_future(_read(process, incoming, most, ended))
    writing = asyncio.ensure_future(_write(process, outgoing, ended))
    try:
        yield received, sent
    finally:
        for task in (reading, writing):
            task.cancel()
        await asyncio.wait([reading, writing], timeout=KILL_S)
        for stream in (incoming, received, sent, outgoing):
            stream.close()
        await asyncio.wait([asyncio.ensure_future(process.close())], timeout=4 * KILL_S)  # it goes on if this is cancelled


async def _read(process: McpProcess, incoming: Any, most: int, ended: Callable[[str], None]) -> None:
    """Pass on each line that is a message; what else a server prints is left out."""
    from mcp.shared.message import SessionMessage  # pyright: ignore[reportMissingImports]
    from mcp.types import jsonrpc_message_adapter  # pyright: ignore[reportMissingImports]

    try:
        # bounded: `stdio_streams` cancels it
        while line := await process.stdout.readline():
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                continue
            await incoming.send(message)
        ended(await process.ended())
    except ValueError:  # from readline
        ended(f"sent a line of more than {most:,} bytes")
    except OSError as error:
        ended(f"cannot be read: {error}")
    finally:
        incoming.close()  # the end of the connection, and of all calls


async def _write(process: McpProcess, outgoing: Any, ended: Callable[[str], None]) -> None:
    try:
        async for each in outgoing:
            process.stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            async with asyncio.timeout(DEAF_S):
                await process.stdin.drain()
    except TimeoutError:
        ended(f"read nothing for {DEAF_S:g} s")
    except OSError:  # it has ended, which its stdout tells
        return
