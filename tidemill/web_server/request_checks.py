"""Checks of a request before the application sees it: its head, the API key, where it comes from."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.api_formats.error_bodies import error_body
from tidemill.core.errors import ApiError

HEALTH = "/health"
MOST_TARGET = 8 << 10  # bytes of the path with its query
MOST_HEADERS = 100
MOST_HEAD = 32 << 10  # bytes of all headers


class RequestCheck:
    """Middleware that answers a request itself if `check` returns a response."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], Response | None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)


def encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def reply(value: dict[str, Any], status: int = 200, **headers: str) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


def refusal(path: str, error: ApiError, **headers: str) -> Response:
    """The reply that refuses a request to this path."""
    return reply(error_body(path, error), error.status, **headers)


def check_head(scope: Scope) -> Response | None:
    """Refuse a head that is too long or ambiguous about the body's length, and close the connection.

    Bytes after such a head may be no request.
    """
    headers = scope["headers"]
    names = {name for name, _ in headers}
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_TARGET:
        status, message = 414, f"the path is longer than {MOST_TARGET} bytes"
    elif len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
        status, message = 431, f"the headers are more than {MOST_HEADERS}, or longer than {MOST_HEAD} bytes"
    elif b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        # A proxy may go by the other header, and take a part of the body for the next request.
        status = 400
        message = "a body has either Content-Length or, from HTTP/1.1 on, Transfer-Encoding: give one of them"
    else:
        return None
    return refusal(scope["path"], ApiError(message, status=status), connection="close")


def check_key(scope: Scope, key: str) -> Response | None:
    """Refuse a request without the API key, except for the health check. The duration tells nothing about the key."""
    if scope["path"] == HEALTH or hmac.compare_digest(given_key(scope), key.encode()):
        return None
    message = "no valid API key: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'"
    return refusal(scope["path"], ApiError(message, status=401, code="invalid_api_key"))


def given_key(scope: Scope) -> bytes:
    """The API key that a request came with, as clients of OpenAI's or of Anthropic's API send it; empty for none."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value.startswith(b"Bearer "):
            return value.removeprefix(b"Bearer ")
        if name == b"x-api-key":
            return value
    return b""


def check_origin(scope: Scope) -> Response | None:
    """Refuse requests from other machines' names or pages, where there is no key.

    A browser sends any page's requests to a loopback address, but it says whose page that was (`origin`), and which name the
    page called (`host`).
    """
    given = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
    for name, url in ((b"host", f"//{given.get(b'host', '')}"), (b"origin", given.get(b"origin"))):
        if url is not None and not _names_loopback(url):
            message = f"{name.decode()} {given.get(name, '')[:100]!r} is not this machine: serve with --api-key"
            return refusal(scope["path"], ApiError(message, status=403))
    return None


def _names_loopback(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
