"""What comes over a wire: calls, replies, a child's report, a worker's frames, HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import zmq
import zmq.asyncio
from engine.server.serving_cases import Running, chat_model, make_engine
from fuzz.hunting import NUMBERS, Attack, Target, edited, mutated, trees
from hypothesis import strategies as st
from ledger.ledger_cases import group

from tidemill.core import serialization
from tidemill.core.errors import CallFailed, PeerDied, RemoteError, StartFailed, WorkerLost
from tidemill.core.types import Array, Group, InfraError, Score, Unscorable
from tidemill.engine.server.app import make_app
from tidemill.engine.server.service import Service
from tidemill.envs.reward_workers import reward_worker as scoring
from tidemill.run.storage.model_folder import ModelFolder
from tidemill.runtime import local, wire_format
from tidemill.runtime.process_logs import Log
from tidemill.runtime.role_host import REPORT_LENGTH, Ready
from tidemill.runtime.rpc import Connection, RpcServer
from tidemill.runtime.wire_format import Call, Cancel, Done, Failed, Hello, Ping, failure
from tidemill.runtime.workers.child import WorkerProcess
from tidemill.runtime.workers.frames import CallBegan, CallFailure, CallResult, WorkerNote, WorkerPing
from tidemill.runtime.workers.worker import Worker, WorkerKind

TOKEN = "t" * 64
TREES = trees(st.sampled_from(["type", "id", "method", "kinds", "message", "call", "done", "failed"]))


class Small(Protocol):
    async def echo(self, array: Array) -> Array: ...
    async def count(self, group: Group, names: list[str], table: dict[str, float]) -> int: ...


class Serving:
    async def echo(self, array: Array) -> Array:
        return array

    async def count(self, group: Group, names: list[str], table: dict[str, float]) -> int:
        return len(group.trajectories) + len(names) + len(table)


@contextmanager
def looping() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines one after another in one loop."""
    with asyncio.Runner() as runner:
        yield runner.run


# --- calls and replies ---------------------------------------------------------------------------------------------------


@contextmanager
def calls(folder: Path) -> Iterator[Attack]:
    """Messages to a server; after each list of them it must still answer a call of its own run."""
    with looping() as run, tempfile.TemporaryDirectory(prefix="tm") as place:

        async def start() -> tuple[RpcServer, asyncio.Task[None], Any]:
            server = RpcServer(Serving(), Small, TOKEN, max_frame=1 << 20)
            address = server.bind(f"ipc://{place}/rpc")
            return server, asyncio.create_task(server.run()), Connection(Small, address, TOKEN, "server", deadline=10)

        async def attack(messages: list[list[bytes]]) -> None:
            context = zmq.asyncio.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.connect(f"ipc://{place}/rpc")
            for message in messages:
                await stranger.send_multipart(message)
            assert (await connection.proxy.echo(np.arange(3))).tolist() == [0, 1, 2]
            stranger.close(linger=0)
            context.term()
            assert not serving.done()

        server, serving, connection = run(start())
        yield lambda messages: run(attack(messages))

        async def stop() -> None:
            await connection.close()
            server.stop()
            await asyncio.wait_for(serving, 10)

        run(stop())


@contextmanager
def replies(folder: Path) -> Iterator[Attack]:
    """Messages from a server that has gone mad, then the true reply: the caller gets a result or a named error."""
    with looping() as run, tempfile.TemporaryDirectory(prefix="tm") as place:

        async def attack(messages: list[list[bytes]]) -> None:
            context = zmq.asyncio.Context()
            router = context.socket(zmq.ROUTER)
            router.bind(f"ipc://{place}/rpc")
            connection = Connection(Small, f"ipc://{place}/rpc", TOKEN, "server", deadline=10)
            try:
                call = asyncio.create_task(connection.proxy.echo(np.arange(3)))
                identity = (await router.recv_multipart())[0]
                for message in [*messages, [serialization.encode(Done(0)), serialization.encode(np.arange(3))]]:
                    await router.send_multipart([identity, *message])
                await call
            finally:
                await connection.close()
                router.close(linger=0)
                context.term()

        yield lambda messages: run(attack(messages))


def messages_to_a_server() -> st.SearchStrategy[list[list[bytes]]]:
    method = st.sampled_from(["echo", "count", "__init__", "_token", "", "m" * 5000]) | st.text(max_size=5)
    others = [st.builds(kind, st.integers(0, 9)) for kind in (Cancel, Hello, Ping)]
    known = st.one_of(st.builds(Call, st.integers(0, 9), method), *others)
    request = known.map(serialization.encode)
    real = serialization.encode((group(0), ["a"], {"b": 1.0}))
    payload = (
        st.binary(max_size=60) | st.just(serialization.encode((np.arange(5),))) | st.just(real) | mutated(real) | _msgpack()
    )
    token = st.sampled_from([TOKEN.encode(), TOKEN.encode(), TOKEN.encode(), b"", b"wrong", TOKEN.encode()[:-1]])
    sound = st.tuples(token, request | mutated(request) | _msgpack(), payload).map(list)
    return st.lists(
        sound | st.lists(st.binary(max_size=80) | token | request, min_size=1, max_size=6), min_size=1, max_size=8
    )


def messages_to_a_caller() -> st.SearchStrategy[list[list[bytes]]]:
    kinds = st.lists(
        st.sampled_from([*wire_format._REBUILT, "SystemExit", "KeyboardInterrupt", "CancelledError", ""]), max_size=3
    )
    failed = st.builds(Failed, st.integers(0, 2), kinds, st.text(max_size=9), st.text(max_size=9))
    reply = (failed | st.builds(Done, st.integers(0, 2))).map(serialization.encode)
    payload = (
        st.binary(max_size=60)
        | st.just(serialization.encode(np.arange(4)))
        | mutated(serialization.encode(np.arange(9)))
        | _msgpack()
    )
    sound = st.tuples(reply | mutated(reply) | _msgpack(), payload).map(list)
    return st.lists(sound | st.lists(st.binary(max_size=60) | reply, min_size=1, max_size=4), min_size=1, max_size=3)


def _msgpack() -> st.SearchStrategy[bytes]:
    nested = st.sampled_from([b"\x91", b"\x81\xa1a", b"\x81\xa4type"]).flatmap(
        lambda part: st.integers(1, 4000).map(lambda n: part * n + b"\xc0")
    )
    lengths = st.sampled_from(
        [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
    )
    return nested | lengths | TREES.map(_packed)


def _packed(tree: Any) -> bytes:
    try:
        return serialization.encode(tree)
    except (OverflowError, TypeError, ValueError):  # numbers that msgpack does not have
        return b"\xc0"


# --- children ------------------------------------------------------------------------------------------------------------


class Ended:
    """A process that has ended."""

    async def wait(self) -> str:
        return "exit status 1"


@contextmanager
def reports(folder: Path) -> Iterator[Attack]:
    log = Log.at(folder / "child.log")
    log.path.write_text("what it said\n")

    async def attack(raw: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, raw[: 1 << 15])
        os.close(writing)
        await local._reported(reading, Ended(), "child", log)  # type: ignore[arg-type]

    with looping() as run:
        yield lambda raw: run(attack(raw))


def report_bytes() -> st.SearchStrategy[bytes]:
    def framed(body: bytes, length: int | None) -> bytes:
        return (len(body) if length is None else length).to_bytes(REPORT_LENGTH, "big") + body

    ready = st.builds(Ready, st.text(max_size=20), st.text(max_size=20)).map(serialization.encode)
    failed = st.builds(lambda text: failure(0, ValueError(text)), st.text(max_size=9)).map(serialization.encode)
    body = ready | failed | mutated(ready | failed) | _msgpack() | st.binary(max_size=40)
    return st.builds(framed, body, st.sampled_from([None, None, None, 0, 1, 2**31, 2**32 - 1])) | st.binary(max_size=40)


class Speaking(WorkerProcess):
    """A worker process whose every word is given."""

    def __init__(self, words: bytes) -> None:
        self.pid, self.title = 0, "the scoring worker"  # no process: it is never found to be stopped
        self._stdout = asyncio.StreamReader()
        self._stdout.feed_data(words)
        self._stdout.feed_eof()

    def post(self, body: bytes) -> None: ...

    def kill(self) -> None: ...

    async def epitaph(self) -> str:
        return "the scoring worker ended"


@contextmanager
def worker_frames(_: Path) -> Iterator[Attack]:
    request = scoring.RewardRequest("reward.py:score", "score", [], {})
    kind = WorkerKind("reward_worker", "the scoring worker", scoring.Outcomes)

    async def attack(words: bytes) -> None:
        worker = Worker(Speaking(words), kind)
        serving = asyncio.ensure_future(worker.serve())
        try:
            outcomes = await worker.call(3, request, "score", loads="score", limit_s=5.0)
            assert all(isinstance(o, Score | Unscorable | InfraError) for o in outcomes)
        finally:
            await serving

    with looping() as run:
        yield lambda words: run(attack(words))


def worker_words() -> st.SearchStrategy[bytes]:
    outcome = st.builds(Score, st.floats(allow_nan=False, allow_infinity=False)) | st.builds(InfraError, st.text(max_size=5))
    ids = st.sampled_from([3, 3, 3, 4])
    done = st.builds(CallResult, ids, st.lists(outcome, max_size=2), st.booleans())
    other = st.builds(WorkerNote, ids, st.none()) | st.builds(CallFailure, ids, st.text(max_size=5), st.text(max_size=5))
    body = (done | other | st.builds(CallBegan, ids) | st.builds(WorkerPing, ids)).map(serialization.encode)
    nan = serialization.encode({"type": "CallResult", "id": 3, "value": [{"type": "Score", "value": float("nan")}]})
    wild = body | body | mutated(body) | _msgpack() | st.just(nan) | st.binary(max_size=30)

    def framed(parts: list[bytes]) -> bytes:
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    began = serialization.encode(CallBegan(3))
    framed_ones = st.lists(wild, max_size=3).map(lambda parts: framed([began, *parts]))
    return framed_ones | mutated(framed_ones) | st.lists(wild, max_size=3).map(framed) | st.binary(max_size=40)


# --- HTTP ----------------------------------------------------------------------------------------------------------------

COMPLETION = {"model": "bytes", "prompt": "ab", "max_tokens": 2, "n": 1, "temperature": 1.0, "logprobs": 1, "stop": ["x"]}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "top_p": 0.5, "stream": False}
PATHS = {"completions": COMPLETION, "chat/completions": CHAT}


@contextmanager
def http_bodies(folder: Path) -> Iterator[Attack]:
    model = ModelFolder.open(chat_model(folder / "bytes", context=32))
    with looping() as run:

        async def start() -> Any:
            engine = make_engine(model.path)
            return Service(engine, model.tokenizer, "bytes", context=32, vocab=model.architecture.vocab)

        async def attack(given: tuple[str, bytes]) -> None:
            response = await client.post(f"/v1/{given[0]}", content=given[1])
            assert response.status_code in (200, 400, 404, 413), response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]
                raise Refused(response.text)

        service = run(start())
        transport = httpx.ASGITransport(make_app(service, None))
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20)
        yield lambda given: run(attack(given))
        run(client.aclose())
        run(service.close())


class Refused(Exception):
    """An error in OpenAI's format, and not a server's."""


def bodies() -> st.SearchStrategy[tuple[str, bytes]]:
    keys = st.sampled_from(
        [*COMPLETION, *CHAT, "echo", "seed", "top_k", "min_p", "ignore_eos", "stream_options", "role", "extra"]
    )

    def of(path: str) -> st.SearchStrategy[tuple[str, bytes]]:
        valid = PATHS[path]
        changed = edited(valid, keys) | st.dictionaries(keys, NUMBERS | st.text(max_size=5), max_size=3).map(
            lambda t: valid | t
        )
        nested = st.integers(1, 3000).map(lambda n: b'{"model":"bytes","prompt":' + b"[" * n + b"1" + b"]" * n + b"}")
        raw = changed.map(_json) | mutated(_json(valid)) | nested | st.binary(max_size=60) | trees(keys).map(_json)
        return st.tuples(st.just(path), raw)

    return st.sampled_from(list(PATHS)).flatmap(of)


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


@contextmanager
def http_wire(folder: Path) -> Iterator[Attack]:
    """Bytes to the port, of which the last is the last: an answer that is not the server's fault, or none."""
    with Running(chat_model(folder / "bytes", context=32)) as running, _server_log() as log:
        port = int(running.url.rpartition(":")[2])

        def attack(raw: bytes) -> None:
            answer = b""
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                try:
                    client.sendall(raw)
                    client.shutdown(socket.SHUT_WR)
                    while part := client.recv(1 << 16):
                        answer += part
                except ConnectionError:  # it has hung up: so it may
                    pass
            answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert answer == b"" or answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer[:200]

        yield attack
        assert running.client.models.list().data
        assert "Traceback" not in log.getvalue(), log.getvalue()[:2000]  # a stranger could fill the disk with them


@contextmanager
def _server_log() -> Iterator[io.StringIO]:
    """What uvicorn logs, in place of where it goes."""
    told = io.StringIO()
    logger, handler = logging.getLogger("uvicorn.error"), logging.StreamHandler(told)
    before, logger.propagate, logger.handlers = (logger.propagate, logger.handlers), False, [handler]
    yield told
    logger.propagate, logger.handlers = before


def requests() -> st.SearchStrategy[bytes]:
    body = _json(COMPLETION)
    lengths = st.sampled_from(
        [str(len(body)), "0", "-1", "1", "99999999999999999999", "1e3", "0x10", "", "5, 5", str(8 << 20)]
    )
    chunk = st.sampled_from(
        [b"5\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"5;x=" + b"y" * 500 + b"\r\n", b"0\r\n\r\n", b"zz\r\n"]
    )
    chunked = st.lists(chunk | st.binary(max_size=9) | st.just(b"hello\r\n"), max_size=6).map(b"".join)

    def of(method: str, path: str, headers: list[str], body: bytes) -> bytes:
        head = "".join(f"{line}\r\n" for line in [f"{method} /v1/{path} HTTP/1.1", "host: localhost", *headers])
        return head.encode("latin-1", "replace") + b"\r\n" + body

    method = st.sampled_from(["POST", "POST", "GET", "OPTIONS", "PRI", ""])
    path = st.sampled_from([*PATHS, "models", "models/bytes", "models/%00", "a" * 9000, "%ff%fe", "../../etc/passwd"])
    length = lengths.map(lambda n: [f"content-length: {n}"])
    odd = st.sampled_from(
        ["transfer-encoding: chunked", "expect: 100-continue", "connection: upgrade", "upgrade: h2c", "x" * 300]
    )
    plain = st.builds(of, method, path, length, st.just(body) | mutated(body) | st.binary(max_size=30))
    streamed = st.builds(of, method, path, st.just(["transfer-encoding: chunked"]), chunked)
    strange = st.builds(of, method, path, st.lists(odd | length.map(lambda h: h[0]), max_size=4), st.just(body))
    return plain | streamed | strange | mutated(plain | streamed) | st.binary(max_size=80)


ERRORS = (*wire_format._REBUILT.values(), RemoteError, PeerDied)
TARGETS = [
    Target("wire: calls to a server", messages_to_a_server(), calls),
    Target("wire: replies to a caller", messages_to_a_caller(), replies, ERRORS),
    Target("wire: a child's report", report_bytes(), reports, (StartFailed, *ERRORS)),
    Target("wire: a scoring worker's frames", worker_words(), worker_frames, (WorkerLost, CallFailed)),
    Target("HTTP: bodies", bodies(), http_bodies, (Refused,)),
    Target("HTTP: the wire", requests(), http_wire),
]
