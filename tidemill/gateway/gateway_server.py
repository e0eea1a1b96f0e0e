"""The HTTP server of a process's gateways: one for all episodes, which are told apart by their keys."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.api_formats.body_decoding import beside
from tidemill.api_formats.replies import StreamShape, TextPiece, Usage
from tidemill.core.errors import ApiError
from tidemill.core.reply import Reply
from tidemill.gateway.dialects import DIALECTS, ModelCall, piece_of
from tidemill.gateway.episode_calls import EpisodeCalls
from tidemill.web_server.exchange import LEFT, EventStream, body_of, failed, http_error, refused, while_connected
from tidemill.web_server.http_server import HttpServer, address_of, bind
from tidemill.web_server.request_checks import RequestCheck, check_head, given_key, refusal, reply

HOST = "127.0.0.1"
STOP_S = 2.0  # seconds for replies that are being sent when the server stops


class EpisodeServer(HttpServer):
    """uvicorn beside other work of its event loop: it leaves the process's signals alone."""

    def capture_signals(self) -> Any:
        return nullcontext()


class GatewayServer:
    """The server, from the first episode of an event loop to its last one."""

    def __init__(self, model: str) -> None:
        self.model, self.users = model, 0
        self._episodes: dict[str, tuple[str, EpisodeCalls]] = {}  # by the public part of the key
        self._socket = bind(HOST, 0, api_key=None)
        self.url = address_of(self._socket)
        self._server = EpisodeServer(self._app(), "", lifespan="off")
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))

    async def started(self) -> None:
        """Wait until the server listens. Raises what prevents it."""
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End the server; replies that are being sent have a moment."""
        self._server.should_exit = True
        _, late = await asyncio.wait({self._serving}, timeout=STOP_S)
        if late:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait(late, timeout=STOP_S)
        self._socket.close()

    def admit(self, calls: EpisodeCalls) -> str:
        """A key for the calls of an episode."""
        name, secret = secrets.token_hex(8), secrets.token_hex(16)
        self._episodes[name] = secret, calls
        return f"tidemill-{name}-{secret}"

    def dismiss(self, key: str) -> None:
        """Forget a key, which ends its episode here."""
        self._episodes.pop(key.split("-")[1])

    def _app(self) -> Starlette:
        async def models(request: Request) -> Response:
            self._calls(request)
            about = {"id": self.model, "object": "model", "created": 0, "owned_by": "tidemill"}
            return reply({"object": "list", "data": [about]})

        return Starlette(
            routes=[
                Route("/v1/models", models),
                *(Route(path, self._answer(path, read), methods=["POST"]) for path, read in DIALECTS.items()),
            ],
            middleware=[Middleware(RequestCheck, check=check_head)],
            exception_handlers={ApiError: refused, HTTPException: http_error, Exception: failed},
        )

    def _calls(self, request: Request) -> EpisodeCalls:
        """The calls of the episode whose key a request has. Raises ApiError."""
        _, _, rest = given_key(request.scope).decode("latin-1").partition("-")
        name, _, given = rest.partition("-")
        secret, calls = self._episodes.get(name, ("", None))
        if calls is None or not hmac.compare_digest(given.encode(), secret.encode()):
            message = "no episode has this API key, or it has ended: use the key that the episode's gateway gave"
            raise ApiError(message, status=401, code="invalid_api_key")
        return calls

    def _answer(self, path: str, read: Callable[..., ModelCall]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            calls = self._calls(request)
            try:
                return await self._answered(calls, path, read, request)
            except Exception as error:
                told = calls.refusal(error)
                return refusal(path, told, **({"x-should-retry": "false"} if told.status >= 500 else {}))

        return endpoint

    async def _answered(self, calls: EpisodeCalls, path: str, read: Callable[..., ModelCall], request: Request) -> Response:
        raw = await body_of(request)
        asked = await while_connected(request.receive, beside(raw, read, raw, calls.earlier))
        if asked is None:
            return Response(status_code=LEFT)
        call = calls.call_of(path, raw, asked, request.headers)
        with calls.waiting_for(call) as work:
            try:
                replies = await while_connected(request.receive, work)  # which goes on when this client leaves
            except asyncio.CancelledError:
                if not work.cancelled():
                    raise
                why = calls.over or "the call was given up, because its client had left"
                raise ApiError(why, status=410, code="episode_over") from None
        if replies is None:
            return Response(status_code=LEFT)
        shape = asked.shape(self.model, call.id, call.created)
        pieces, usage = [piece_of(each, asked) for each in replies], _usage(replies, asked.n)
        if asked.stream:
            return EventStream(path, _events(shape, pieces, usage, asked.include_usage))
        return reply(shape.reply(pieces, usage))


async def _events(
    shape: StreamShape, pieces: list[TextPiece], usage: Usage, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    last = shape.between if include_usage else {}
    for index, piece in enumerate(pieces):
        for event in (*shape.opening(index, usage), *shape.chunks(index, piece)):
            yield event | last
    if include_usage:
        for event in shape.closing(usage):
            yield event


def _usage(replies: list[Reply], n: int) -> Usage:
    """Tokens of one call; a prompt with several replies counts once."""
    prompts = replies[::n]
    return Usage(
        sum(each.prompt_tokens for each in prompts),
        sum(each.tokens for each in replies),
        sum(each.cached_tokens for each in prompts),
    )
