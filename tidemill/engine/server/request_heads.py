"""Refuses requests whose head is too long or ambiguous about the body's length."""

from __future__ import annotations

import json

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.openai_api.responses import error_body

MOST_TARGET = 8 << 10  # bytes of the path with its query
MOST_HEADERS = 100
MOST_HEAD = 32 << 10  # bytes of all headers


class HeadCheck:
    """Middleware that answers such a request itself and closes its connection.

    Bytes after such a head may be no request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := _refused(scope)):
            status, message = refused
            body = json.dumps(error_body(message, status)).encode()
            response = Response(body, status, headers={"connection": "close"}, media_type="application/json")
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refused(scope: Scope) -> tuple[int, str] | None:
    headers = scope["headers"]
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_TARGET:
        return 414, f"the path is longer than {MOST_TARGET} bytes"
    if len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
        return 431, f"the headers are more than {MOST_HEADERS}, or longer than {MOST_HEAD} bytes"
    names = {name for name, _ in headers}
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        # A proxy may go by the other header, and take a part of the body for the next request.
        return 400, "a body has either Content-Length or, from HTTP/1.1 on, Transfer-Encoding: give one of them"
    return None
