"""The HTTP application: routes, API key, bounded bodies, errors in OpenAI's format.

When a client leaves, its work ends: its choices are aborted in the engine between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.api_formats.requests import MAX_BODY
from tidemill.api_formats.responses import error_body
from tidemill.core.errors import ApiError
from tidemill.engine.server.prometheus_metrics import CONTENT_TYPE, CountRequests
from tidemill.engine.server.request_checks import (
    HEALTH,
    RequestCheck,
    check_head,
    check_key,
    check_origin,
    encoded,
    refusal,
    reply,
)
from tidemill.engine.server.service import CheckedRequest, Service

T = TypeVar("T")
log = logging.getLogger(__name__)
BODY_S = 60.0  # deadline of a request's body


def make_app(service: Service, api_key: str | None) -> Starlette:
    """The application for a service, which is closed when the application shuts down."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        service.reader.begin()
        yield
        await service.close()

    async def models(request: Request) -> Response:
        return reply({"object": "list", "data": [service.model()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return reply(service.model())

    async def health(request: Request) -> Response:
        alive = service.engine.alive
        return reply({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(await service.engine.stats()), media_type=CONTENT_TYPE)

    async def tokenizer_info(request: Request) -> Response:
        return reply(service.tokens.info())

    routes = [
        Route(HEALTH, health),
        Route("/metrics", metrics),
        Route("/tokenizer_info", tokenizer_info),
        Route("/tokenize", _tell(service.tokens.tokenize), methods=["POST"]),
        Route("/detokenize", _tell(service.tokens.detokenize), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", _answer(service, service.completion), methods=["POST"]),
        Route("/v1/chat/completions", _answer(service, service.chat), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestCheck, check=check_head),
            Middleware(CountRequests, metrics=service.metrics, routes=[route.path for route in routes]),
            Middleware(RequestCheck, check=check_origin if api_key is None else partial(check_key, key=api_key)),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _http_error, Exception: _failed},
        lifespan=lifespan,
    )


class EventStream(Response):
    """Server-sent events, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": _event(encoded(event)), "more_body": True})
        except Exception as error:  # the status is sent, so the client can only be told in the stream
            log.exception("a streamed reply failed")
            told = encoded(error_body(f"the engine failed: {error}", 500))
            await send({"type": "http.response.body", "body": _event(told), "more_body": True})
        await send({"type": "http.response.body", "body": _event(b"[DONE]"), "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with the work cancelled, if the client leaves first.

    Call it after the body has been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        # bounded: by the tokens asked for; an engine that fails fails its requests
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))  # bounded: both are cancelled


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # bounded: it is cancelled with the work
        pass


def _answer(
    service: Service, prepare: Callable[[bytes], Coroutine[Any, Any, CheckedRequest]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        raw = await _body(request)
        prepared = await while_connected(request.receive, prepare(raw))
        if prepared is None:
            return Response(status_code=499)  # the client has left
        if prepared.stream:
            return EventStream(service.events(prepared))
        value = await while_connected(request.receive, service.reply(prepared))
        return Response(status_code=499) if value is None else reply(value)

    return endpoint


def _tell(work: Callable[[bytes], Coroutine[Any, Any, dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        value = await while_connected(request.receive, work(await _body(request)))
        return Response(status_code=499) if value is None else reply(value)

    return endpoint


async def _body(request: Request) -> bytes:
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
        raise ApiError("the client left before its request was complete", status=499) from None
    return bytes(raw)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    about = f"{request.method} {request.url.path}"
    message = {404: f"{about}: there is no such path here", 405: f"{about}: not with this method"}.get(error.status_code)
    return reply(error_body(message or error.detail, error.status_code), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return reply(error_body(f"the engine failed: {error}", 500), 500)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
