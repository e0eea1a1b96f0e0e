"""HTTP servers: a socket that is bound first, and uvicorn on it."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from tidemill.core.errors import ConfigError
from tidemill.web_server.connection import HEAD_S, BoundedConnection

GRACE_S = 5  # seconds for requests under way when the server stops
CONNECTIONS = 1024  # open at a time; each may hold a body (`requests.MAX_BODY`)
BACKLOG = 128  # connections that are accepted in one turn of the loop
_SPARE = 256  # descriptors for everything else: a turn's connections, those above the limit, files, pipes


def bind(host: str, port: int, *, api_key: str | None) -> socket.socket:
    """A bound socket that does not listen yet; port 0 is any free one. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"host {host!r}, port {port}: not an address ({error})") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # "localhost" is both
    if api_key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"host {host!r} can be reached from other machines: give a key (--api-key-file), or leave --host out"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_why_not(error, host, port)) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL http://HOST:PORT of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


def connections() -> int:
    """The most connections at a time: CONNECTIONS, or fewer if the system allows fewer descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + _SPARE
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS, max(soft - _SPARE, soft // 4))


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections. It prints `announcement`, if there is one, when it listens."""

    def __init__(self, app: Starlette, announcement: str, *, lifespan: Literal["on", "off"] = "on") -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan=lifespan,
            log_level="warning",
            access_log=False,
            limit_concurrency=connections() + 1,
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=int(HEAD_S),
        )
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._announcement:
            print(self._announcement, flush=True)


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not for ordinary users: choose one from 1024 up with --port"
    return f"cannot serve on {host}, port {port}: {error.strerror}"
