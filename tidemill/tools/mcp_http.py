"""MCP over HTTP, with a limit on what a response may hold, and no decompression."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def http_streams(url: str, headers: Mapping[str, str], limit_s: float, most: int) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of a server at `url`, from the SDK's transport. limit_s: of a silence. most: bytes of one response."""
    import httpx2  # pyright: ignore[reportMissingImports]
    from mcp.client.streamable_http import streamable_http_client  # pyright: ignore[reportMissingImports]

    # Compressed, a small response could be a large one.
    own = {**headers, "Accept-Encoding": "identity"}
    transport = _limited(httpx2.AsyncHTTPTransport(), most)
    async with (
        httpx2.AsyncClient(transport=transport, headers=own, timeout=limit_s) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=most) as streams,
    ):
        yield streams


def _limited(transport: Any, most: int) -> Any:
    """A transport whose responses end in an error at `most` bytes."""
    import httpx2  # pyright: ignore[reportMissingImports]

    class Body(httpx2.AsyncByteStream):
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._inner:
                size += len(chunk)
                if size > most:
                    raise httpx2.StreamError(f"a response of more than {most:,} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._inner.aclose()

    class Limited(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await transport.handle_async_request(request)
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                await response.aclose()
                raise httpx2.RemoteProtocolError("a compressed response, which was not asked for", request=request)
            response.stream = Body(response.stream)
            return response

        async def aclose(self) -> None:
            await transport.aclose()

    return Limited()
