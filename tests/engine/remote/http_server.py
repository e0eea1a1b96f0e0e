"""A small HTTP server in the test's own event loop, whose replies are written by the test byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    path: str  # or a whole address, where the server is taken for a proxy
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


Answer = Callable[[Asked], Awaitable[bytes | None]]
"""Returns the bytes of a reply; None: the connection is closed, whatever was written so far."""


def reply(body: Any, status: int = 200, kind: str = "application/json", **headers: str) -> bytes:
    """The bytes of a reply. body: bytes as they are, or anything that becomes JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": kind, "content-length": str(len(raw))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + raw


@asynccontextmanager
async def serving(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    """A server that answers by `answer`; yields its address. port: 0 for any."""
    writers = set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = dict[str, str]()
                while (line := (await reader.readline()).decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if (said := await answer(Asked(method, path, headers, body, reader, writer))) is None:
                    break
                writer.write(said)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=1000)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
