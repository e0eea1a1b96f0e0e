"""The HTTP application of `tidemill serve`: its routes, and the checks before them.

When a client leaves, its work ends: its choices are aborted in the engine between two steps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.api_formats.error_bodies import MESSAGES, RESPONSES
from tidemill.core.errors import ApiError
from tidemill.engine.server.prometheus_metrics import CONTENT_TYPE, CountRequests
from tidemill.engine.server.service import CheckedRequest, Service
from tidemill.web_server.exchange import LEFT, EventStream, body_of, failed, http_error, refused, while_connected
from tidemill.web_server.request_checks import HEALTH, RequestCheck, check_head, check_key, check_origin, reply


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
        Route(RESPONSES, _answer(service, service.responses), methods=["POST"]),
        Route(MESSAGES, _answer(service, service.messages), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", _tell(service.count_tokens), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestCheck, check=check_head),
            Middleware(CountRequests, metrics=service.metrics, routes=[route.path for route in routes]),
            Middleware(RequestCheck, check=check_origin if api_key is None else partial(check_key, key=api_key)),
        ],
        exception_handlers={ApiError: refused, HTTPException: http_error, Exception: failed},
        lifespan=lifespan,
    )


def _answer(
    service: Service, prepare: Callable[[bytes], Coroutine[Any, Any, CheckedRequest]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        raw = await body_of(request)
        prepared = await while_connected(request.receive, prepare(raw))
        if prepared is None:
            return Response(status_code=LEFT)  # the client has left
        if prepared.stream:
            return EventStream(request.url.path, service.events(prepared))
        value = await while_connected(request.receive, service.reply(prepared))
        return Response(status_code=LEFT) if value is None else reply(value)

    return endpoint


def _tell(work: Callable[[bytes], Coroutine[Any, Any, dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        value = await while_connected(request.receive, work(await body_of(request)))
        return Response(status_code=LEFT) if value is None else reply(value)

    return endpoint
