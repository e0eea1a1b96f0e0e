"""Connections that are held without a request, heads that two servers read differently, and room for who comes next."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from serving_cases import Running
from test_serving_deadlines import head, opened

from tidemill.api_formats.requests import MAX_BODY
from tidemill.web_server import connection, request_checks

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def locked(characters: Running) -> Iterator[Running]:
    with Running(characters.folder, api_key="sesame") as running:
        yield running


def answer(client: socket.socket) -> bytes:
    """What comes, until it ends as the bodies here do, or the connection does."""
    said = b""
    with suppress(ConnectionError):
        while part := b"" if said.endswith((b"}}", b"]}")) else client.recv(10_000):
            said += part
    return said


def is_closed(client: socket.socket, also: bytes = b"") -> bool:
    """Whether it comes to an end within ten seconds, while `also` is sent again and again."""
    client.settimeout(0.05)
    begin = time.monotonic()
    while time.monotonic() - begin < 10:
        try:
            if not client.recv(10_000):
                return True
        except TimeoutError:
            with suppress(OSError):
                client.sendall(also)
        except OSError:
            return True
    return False


REFUSED_EARLY = {
    401: head("completions", 100),
    403: head("completions", 100).replace(b"localhost", b"evil.example"),
    404: head("nothing", 100),
    405: head("models", 100),
    413: head("completions", MAX_BODY + 1),
    414: head("x" * 10_000, 100),
}


@pytest.mark.parametrize("status", REFUSED_EARLY)
def test_who_is_refused_is_not_waited_for(
    chats: Running, locked: Running, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Its body does not come to an end, and each byte of it would put an idle connection's deadline off."""
    monkeypatch.setattr(connection, "REST_S", 0.3)
    with opened(locked if status == 401 else chats) as client:
        client.sendall(REFUSED_EARLY[status] + b"{")
        assert answer(client).startswith(f"HTTP/1.1 {status}".encode())
        assert is_closed(client, also=b"a")


def test_a_refused_body_that_ends_leaves_the_connection_usable(locked: Running) -> None:
    with opened(locked) as client:
        for _ in range(3):
            client.sendall(head("completions", 100) + b"{")
            assert answer(client).startswith(b"HTTP/1.1 401")
            client.sendall(b"a" * 99)


def test_a_connection_that_ends_with_untaken_bytes_has_a_deadline(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is complete, larger than the buffers of the kernel, and below what uvicorn calls full."""
    monkeypatch.setattr(connection, "TAKE_S", 0.3)
    chats._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    before = len(chats._server.server_state.connections)
    body = {"model": chats.name, "prompt": "a", "max_tokens": 40, "logprobs": 20, "ignore_eos": True}
    raw = json.dumps(body).encode()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(10)
            client.connect(("127.0.0.1", int(chats.url.rpartition(":")[2])))
            client.sendall(head("completions", len(raw)) + raw)
            assert client.recv(12) == b"HTTP/1.1 200"
            begin = time.monotonic()
            while len(chats._server.server_state.connections) > before:
                assert time.monotonic() - begin < 20
                time.sleep(0.02)  # the server is a thread of this process
    finally:
        chats._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)


def test_who_takes_slowly_is_served(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines follow what was taken."""
    monkeypatch.setattr(connection, "TAKE_S", 0.3)
    monkeypatch.setattr(connection, "TAKEN", 1)
    chats._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = {"model": chats.name, "prompt": "a", "max_tokens": 40, "n": 8, "logprobs": 20, "ignore_eos": True}
    raw = json.dumps(body).encode()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(10)
            client.connect(("127.0.0.1", int(chats.url.rpartition(":")[2])))
            client.sendall(head("completions", len(raw)) + raw)
            said, begin = b"", time.monotonic()
            while not said.endswith(b"}}"):
                part = client.recv(1024)
                assert part, "disconnected"
                said += part
                if time.monotonic() - begin < 1:
                    time.sleep(0.05)
            assert json.loads(said.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 320
    finally:
        chats._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)


@pytest.fixture
def few(chats: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Five connections at a time, and three more that are told so."""
    monkeypatch.setattr(chats._server.config, "limit_concurrency", 6)
    monkeypatch.setattr(connection, "BEYOND", 3)
    for each in list(chats._server.server_state.connections):
        chats.call(_aborted(each))
    return chats


async def _aborted(each: connection.BoundedConnection) -> None:
    each.transport.abort()


def test_who_only_waits_makes_room_for_who_comes(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "YOUNG_S", 0.0)
    with ExitStack() as stack:
        busy = stack.enter_context(opened(few))
        raw = json.dumps({"model": few.name, "prompt": "a", "max_tokens": 250, "stream": True, "ignore_eos": True}).encode()
        busy.sendall(head("completions", len(raw)) + raw)
        assert busy.recv(12) == b"HTTP/1.1 200"
        held = [stack.enter_context(opened(few)) for _ in range(12)]
        for client in held[:6]:
            with suppress(OSError):  # it is closed already
                client.sendall(head("completions", 50))
        with opened(few) as client:
            client.sendall(MODELS)
            assert answer(client).startswith(b"HTTP/1.1 200")
        assert len(few._server.server_state.connections) <= 6
        said = b""
        while b"[DONE]" not in said:
            said += busy.recv(1 << 16)


def test_where_there_is_no_room_that_is_said(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "YOUNG_S", 1000.0)
    with ExitStack() as stack:
        first = [stack.enter_context(opened(few)) for _ in range(5)]
        with opened(few) as client:
            client.sendall(MODELS)
            assert answer(client).startswith(b"HTTP/1.1 503")
        more = [stack.enter_context(opened(few)) for _ in range(5)]
        assert is_closed(more[-1])
        first[0].sendall(MODELS)
        assert first[0].recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 503"), "it is answered"


TWO = MODELS[:-2] + b"content-length: 4\r\n"
HEADS = {
    "two lengths": (TWO + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked before 1.1": (
        b"GET /v1/models HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "lengths that differ": (TWO + b"content-length: 5\r\n\r\nabcd", 400),
    "a list of lengths": (MODELS[:-2] + b"content-length: 4, 5\r\n\r\nabcd", 400),
    "no number": (MODELS[:-2] + b"content-length: +4\r\n\r\nabcd", 400),
    "below nothing": (MODELS[:-2] + b"content-length: -4\r\n\r\nabcd", 400),
    "an unknown coding": (MODELS[:-2] + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "hidden coding": (MODELS[:-2] + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "two hosts": (MODELS[:-2] + b"host: localhost\r\n\r\n", 400),
    "a long path": (MODELS.replace(b"/v1/models", b"/v1/models?" + b"a" * request_checks.MOST_TARGET), 414),
    "a path without end": (MODELS.replace(b"/v1/models", b"/" + b"a" * 70_000), 4),
    "many headers": (MODELS[:-2] + b"x: y\r\n" * 101 + b"\r\n", 431),
    "a long header": (MODELS[:-2] + b"x: " + b"y" * request_checks.MOST_HEAD + b"\r\n\r\n", 4),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_refused_close_the_connection(chats: Running, name: str) -> None:
    """What a proxy may have taken for a second request is none here."""
    raw, status = HEADS[name]
    with opened(chats) as client:
        client.sendall(raw + MODELS)
        said = b""
        with suppress(ConnectionError):
            while part := client.recv(10_000):
                said += part
    assert said.startswith(f"HTTP/1.1 {status}".encode()) and len(re.findall(rb"HTTP/1\.1 \d", said)) == 1, said[:200]


def test_the_openai_client_gives_up_an_idle_connection_before_the_server_does(chats: Running) -> None:
    """Else a request now and then would be sent into a connection that the server has just closed."""
    kept = DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert kept is not None and kept < chats._server.config.timeout_keep_alive <= connection.HEAD_S
