"""Clients that are late: a head that does not come to its end, a body that stays away, a reply that is not taken."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest
from serving_cases import Running

from tidemill.web_server import connection, exchange


def opened(running: Running) -> socket.socket:
    port = int(running.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def head(path: str, length: int) -> bytes:
    return f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_a_head_has_a_deadline(chats: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Also for who keeps sending a byte at a time."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with opened(chats) as client:
        client.sendall(sent)
        client.settimeout(0.05)
        begin = time.monotonic()
        while time.monotonic() - begin < 10:
            try:
                if not client.recv(100):
                    return  # disconnected
                pytest.fail("an answer to half a request")
            except TimeoutError:
                if sent:
                    client.sendall(b"a")
            except OSError:
                return
        pytest.fail("still connected")


def test_a_head_in_the_second_request_of_a_connection_has_one_too(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with opened(chats) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while part := b"" if answer.endswith(b"]}") else client.recv(10_000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /v1/mod")
        assert client.recv(100) == b""


def test_a_body_has_a_deadline(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_S", 0.2)
    with opened(chats) as client:
        client.sendall(head("completions", 100) + b'{"model"')
        answer = b""
        while part := b"" if answer.endswith(b"}}") else client.recv(10_000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 408") and b"did not come within 0.2 s" in answer


def test_a_reply_that_is_not_taken_ends_the_request(chats: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is larger than the buffers of both ends, so that the server cannot be rid of it."""
    monkeypatch.setattr(connection, "TAKE_S", 0.3)
    body = {
        "model": chats.name,
        "prompt": "a",
        "n": 32,
        "max_tokens": 250,
        "stream": True,
        "logprobs": 20,
        "ignore_eos": True,
    }
    raw = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", int(chats.url.rpartition(":")[2])))
        client.sendall(head("completions", len(raw)) + raw)
        said, begin = client.recv(12), time.monotonic()
        assert said == b"HTTP/1.1 200"
        while chats.requests():
            assert time.monotonic() - begin < 60
            time.sleep(0.02)  # the server is a thread of this process: a busy loop here would starve it of the interpreter
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                said = said[-20:] + part
        assert b"[DONE]" not in said
    assert chats.client.models.list().data
