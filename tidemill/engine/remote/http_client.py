"""Client of an inference server over HTTP: JSON in, JSON out, and a deadline on every call.

It asks once and never again: whoever calls it decides what is repeated.

    refused (3xx, 4xx)               ValueError with the server's own sentence
    failed (5xx), gone, unreadable   EngineFailed: the engine pool asks another engine
    silent                           TimeoutError at the deadline
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from tidemill.core.errors import ConfigError, EngineFailed

MOST_BYTES = 256 << 20  # of a reply: 100,000 scored tokens with 20 alternatives each take 200 MB
CONNECT_S = 10.0  # a host that does not answer in this time is gone, whatever the deadline of the call
LOOK_S = 60.0  # for a short answer
IDLE_S = 1.0  # a connection is reused for so long; servers close idle ones after 5 s, and a request must not meet that
IDLE = 16  # connections that are kept for it: the library looks through all of them at each call
MOST_CHARS = 400  # of a server's sentence in an error


class ServerClient:
    """Calls of one server. `name` names it in errors, `key` is sent as a bearer token."""

    def __init__(self, url: str, *, name: str, key: str = "", most_bytes: int = MOST_BYTES) -> None:
        """Make a client of the server at `url`; nothing is sent yet. Raises ConfigError for an unusable address or key."""
        parts = _address(url)
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"the key of {name} holds characters that no HTTP header can carry: expected printable ASCII")
        self.name, self._key, self._most = name, key, most_bytes
        self.address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._closed = False
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # `_send` has the deadline of the whole call
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=IDLE, keepalive_expiry=IDLE_S),
            verify=parts.scheme == "https",  # else certificates are read for nothing
            trust_env=not _is_loopback(parts.hostname or ""),  # a proxy cannot reach this machine's loopback
        )

    async def get(self, path: str, deadline_s: float) -> Any:
        """The reply to a GET: see `post`."""
        return await self._send("GET", path, None, deadline_s)

    async def look(self, path: str) -> Any:
        """`get` for what a server answers between two steps of its model."""
        return await self._send("GET", path, None, LOOK_S)

    async def post(self, path: str, body: Any, deadline_s: float) -> Any:
        """The reply to a POST of `body` as JSON: decoded JSON, the text of a plain one, or None if it is empty."""
        return await self._send("POST", path, body, deadline_s)

    async def close(self) -> None:
        """Close all connections; calls in flight raise EngineFailed. Closing twice is fine."""
        self._closed = True
        await self._http.aclose()

    async def events(self, path: str, body: Any, deadline_s: float) -> AsyncGenerator[Any, None]:
        """The events of a streamed reply, decoded, as they come. Close it (`aclosing`) to end the request.

        Raises what `post` raises, also in the middle, and EngineFailed if the stream ends without saying so.
        """
        what = f"POST {path}"
        async with self._asked("POST", path, body, deadline_s) as reply:
            if reply.status_code >= 300:
                self._decode(what, reply, await reply.aread())
            rest = b""
            async for piece in self._pieces(what, reply):
                *lines, rest = (rest + piece).split(b"\n")
                for line in map(bytes.strip, lines):
                    if line == b"data: [DONE]":
                        return
                    if line.startswith(b"data:"):
                        event = self._decode(what, reply, line[5:])
                        if isinstance(event, dict) and event.get("error"):
                            raise self._error(what, event["error"], line[5:])
                        yield event
        raise EngineFailed(f"{self.name} ended its reply to {what} too early")

    async def _send(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        what, held = f"{method} {path}", bytearray()
        async with self._asked(method, path, body, deadline_s) as reply:
            async for piece in self._pieces(what, reply):
                held += piece
        return self._decode(what, reply, bytes(held))

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any, deadline_s: float) -> AsyncIterator[httpx.Response]:
        """A reply whose body is still to be read, within the deadline."""
        what = f"{method} {path}"
        if self._closed:
            raise EngineFailed(f"{self.name}: {what} was asked after the client was closed")
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit, self._http.stream(method, path, **({} if body is None else {"json": body})) as reply:
                yield reply
        except TimeoutError as error:
            if not limit.expired():  # the caller's own
                raise
            raise TimeoutError(f"{self.name} did not answer {what} within {deadline_s:g} s") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            how = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise EngineFailed(self._hidden(f"{self.name} did not answer {what}, the connection failed ({how})")) from None

    async def _pieces(self, what: str, reply: httpx.Response) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in reply.aiter_bytes():  # bounded: by the deadline of `_asked`
            if (size := size + len(piece)) > self._most:
                raise ValueError(f"{self.name} answered {what} with more than {self._most:,} bytes: ask for less at once")
            yield piece

    def _decode(self, what: str, reply: httpx.Response, raw: bytes) -> Any:
        kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
        if reply.status_code >= 300:
            said = self._hidden(_sentence(raw) or reply.reason_phrase)
            if reply.is_redirect:
                raise ValueError(f"{self.name} sends {what} on to {reply.headers.get('location')!r}: give that address")
            if reply.status_code < 500:
                raise ValueError(f"{self.name} refused {what} ({reply.status_code}): {said}")
            raise EngineFailed(f"{self.name} failed at {what} ({reply.status_code}): {said}")
        if not raw or kind == "text/plain":
            return raw.decode("utf-8", "replace") or None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            shown = self._hidden(_short(raw.decode("utf-8", "replace")))
            raise EngineFailed(f"{self.name} answered {what} with what is no JSON: {shown!r}") from None

    def _error(self, what: str, told: Any, raw: bytes) -> Exception:
        """The error that an event tells of: a refusal, if its code says so, or a failure."""
        code, said = told.get("code") if isinstance(told, dict) else None, self._hidden(_sentence(raw))
        if isinstance(code, int) and 400 <= code < 500:
            return ValueError(f"{self.name} refused {what} ({code}): {said}")
        return EngineFailed(f"{self.name} failed at {what}: {said}")

    def _hidden(self, text: str) -> str:
        """The text without the key, which a server may repeat."""
        return text.replace(self._key, "***") if self._key else text


def _address(url: str) -> SplitResult:
    """The parts of a server's address. Raises ConfigError for one that cannot be used, and shows no password."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        usable, parts = False, SplitResult("", "", "", "", "")
    if parts.username or parts.password:
        raise ConfigError(f"the address of {parts.hostname} holds a user or a password: leave them out, and give a key")
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"the address {url!r} is not a server's: expected http://HOST:PORT or https://HOST")
    return parts


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sentence(raw: bytes) -> str:
    """The sentence of a refusal, in the formats of OpenAI, SGLang, FastAPI and llama.cpp, else the beginning of the text."""
    text = raw.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _short(text)
    for name in ("error", "message", "detail", "msg"):
        if isinstance(found, list) and found:  # FastAPI lists what is wrong
            found = found[0]
        if isinstance(found, dict) and name in found:
            found = found[name]
    return _short(found if isinstance(found, str) else json.dumps(found))


def _short(text: str) -> str:
    line = " ".join(text[: 4 * MOST_CHARS].split())
    return line if len(line) <= MOST_CHARS else f"{line[:MOST_CHARS]}..."
