"""One exchange with a client: its body within limits, work that ends when it leaves, replies and event streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.api_formats.error_bodies import MESSAGES, RESPONSES, error_event
from tidemill.api_formats.requests import MAX_BODY
from tidemill.core.errors import ApiError
from tidemill.web_server.request_checks import encoded, refusal

T = TypeVar("T")
log = logging.getLogger(__name__)
BODY_S = 60.0  # deadline of a request's body
DONE = b"data: [DONE]\n\n"
LEFT = 499  # status of a request whose client has left, which nobody reads


class EventStream(Response):
    """Server-sent events of one path, until they end or the client leaves.

    OpenAI's completions and chats are lines of data, the last of which is [DONE]; other APIs name each event by its type.
    """

    media_type = "text/event-stream"

    def __init__(self, path: str, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._path, self._events = path, events
        self._named = path.startswith((RESPONSES, MESSAGES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": self._event(event), "more_body": True})
        except Exception as error:  # the status is sent, so the client can only be told in the stream
            log.exception("a streamed reply failed")
            told = error_event(self._path, ApiError(f"the engine failed: {error}", status=500))
            await send({"type": "http.response.body", "body": self._event(told), "more_body": True})
        await send({"type": "http.response.body", "body": b"" if self._named else DONE, "more_body": False})

    def _event(self, event: dict[str, Any]) -> bytes:
        name = f"event: {event['type']}\n".encode() if self._named else b""
        return name + b"data: " + encoded(event) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T | None:
    """The result of `work`; None if the client leaves first. A coroutine is cancelled then, and a task goes on.

    Call it after the body has been read.
    """
    working = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        # bounded: by the tokens asked for; an engine that fails fails its requests
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        own = [leaving] if working is work else [working, leaving]
        for task in own:
            task.cancel()
        await asyncio.wait(own)  # bounded: they are cancelled


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # bounded: it is cancelled with the work
        pass


async def body_of(request: Request) -> bytes:
    """The request's body, of at most MAX_BODY bytes, within BODY_S. Raises ApiError.

    The limit holds whatever the headers say.
    """
    too_large = ApiError(f"the body is larger than {MAX_BODY >> 20} MiB", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                raw += part
                if len(raw) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise ApiError(f"the body did not come within {BODY_S:g} s", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client left before its request was complete", status=LEFT) from None
    return bytes(raw)


async def refused(request: Request, error: Exception) -> Response:
    """Handler of an ApiError."""
    assert isinstance(error, ApiError)
    return refusal(request.url.path, error)


async def http_error(request: Request, error: Exception) -> Response:
    """Handler of what the router refuses."""
    assert isinstance(error, HTTPException)
    about = f"{request.method} {request.url.path}"
    message = {404: f"{about}: there is no such path here", 405: f"{about}: not with this method"}.get(error.status_code)
    return refusal(request.url.path, ApiError(message or error.detail, status=error.status_code))


async def failed(request: Request, error: Exception) -> Response:
    """Handler of what nobody expected."""
    return refusal(request.url.path, ApiError(f"the engine failed: {error}", status=500))
