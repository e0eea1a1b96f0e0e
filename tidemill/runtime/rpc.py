"""Remote calls to an object in another process, over ZeroMQ: many in flight, answered in any order.

    server = RpcServer(target, protocol, token); server.bind(address); await server.run()
    connection = Connection(protocol, address, token, name); await connection.proxy.method(...)

Every call has a deadline (I4). A local cancellation or a deadline that passed cancels the remote task. The watcher of the
process calls `died(how)`, and all pending calls fail at once. A server accepts only frames with this run's token and of
bounded size. It counts and drops bytes that it cannot read, or answers with an error when they name a call.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Generic, TypeVar, cast

import zmq
import zmq.asyncio

from tidemill.core import serialization
from tidemill.core.errors import CodecError, PeerDied, PeerTimeout
from tidemill.core.interfaces import Progressing
from tidemill.observability.stall_report import waiting
from tidemill.runtime import wire_format as wire
from tidemill.runtime.wire_format import MAX_FRAME, Method, methods_of

T = TypeVar("T")
DEADLINE_S = 60.0
_NO_COPY = 1 << 16  # bytes from which handing a frame over is cheaper than copying it
_LINGER_MS = 2000  # limit for a closing server to send its last replies


class RpcServer:
    """Serves the methods of `target` that `protocol` declares, until `close` or `stop` is called."""

    def __init__(self, target: object, protocol: type, token: str, max_frame: int = MAX_FRAME) -> None:
        self._target, self._methods, self._token = target, methods_of(protocol), token.encode()
        self._max_frame = max_frame
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.ROUTER, max_frame)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._busy: dict[tuple[bytes, int], tuple[str, float]] = {}  # method, when it came; oldest first
        self._answered = 0  # calls
        self.closed = False  # True once the target's own `close` has returned
        self.refused = 0  # messages with another token or not readable

    def bind(self, address: str) -> str:
        """Listen at `address`, on Linux for this user's processes only; returns it with its port filled in."""
        if address.startswith("ipc:") and sys.platform == "linux":
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Serve calls until `stop` or the target's `close`; then cancel what still runs."""
        reading = asyncio.create_task(self._read())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            # bounded: it serves until `stop` is called or its parent ends it
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            tasks = [reading, stopping, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.close(linger=_LINGER_MS)
            self._context.term()  # bounded: by the sockets' linger

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)  # bounded: a watch; calls have their own deadlines
            identity = frames[0].bytes
            if len(frames) != 4 or not hmac.compare_digest(frames[1].bytes, self._token):
                self.refused += 1
                continue
            try:
                self._accept(identity, serialization.decode(frames[2].buffer, wire.Request), frames[3].buffer)
            except CodecError:
                self.refused += 1

    def _accept(self, identity: bytes, request: wire.Request, payload: memoryview) -> None:
        key = identity, request.id
        if isinstance(request, wire.Cancel):
            if task := self._tasks.get(key):
                task.cancel()
        elif key in self._tasks:
            self.refused += 1
        else:
            task = asyncio.create_task(self._answer(identity, request, payload))
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer(self, identity: bytes, request: wire.Call | wire.Hello | wire.Ping, payload: memoryview) -> None:
        reply: wire.Reply = wire.Done(request.id)
        result = b""
        if isinstance(request, wire.Call):
            self._busy[identity, request.id] = request.method[:80], time.monotonic()
        try:
            result = await self._perform(request, payload)
        except (Exception, asyncio.CancelledError) as error:  # any error goes to the caller
            reply = wire.failure(request.id, error)
        finally:
            if self._busy.pop((identity, request.id), None):
                self._answered += 1
        try:
            await _send(self._socket, [identity, serialization.encode(reply), result])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # both mean that the caller is gone
                raise
        if isinstance(request, wire.Call) and request.method == "close" and isinstance(reply, wire.Done):
            self.closed = True
            self.stop()

    async def _perform(self, request: wire.Call | wire.Hello | wire.Ping, payload: memoryview) -> bytes:
        if isinstance(request, wire.Hello):
            return serialization.encode(sorted(self._methods))
        if isinstance(request, wire.Ping):
            return serialization.encode(self._beat())
        method = self._methods.get(request.method)
        if method is None:
            raise ValueError(f"no method {request.method[:80]!r} here; there are {', '.join(sorted(self._methods))}")
        arguments = serialization.decode(payload, method.arguments)
        result = serialization.encode(await getattr(self._target, method.name)(*arguments))
        if len(result) > self._max_frame:
            raise ValueError(f"{method.name}() returned {len(result)} bytes: at most {self._max_frame} travel")
        return result

    def _beat(self) -> wire.Beat:
        now = time.monotonic()
        done = self._target.progress() if isinstance(self._target, Progressing) else 0.0
        return wire.Beat(self._answered + done, [(method, now - since) for method, since in self._busy.values()])


class Connection(Generic[T]):
    """Connection to an object that a peer serves, by `proxy`; it belongs to the running event loop.

    Calls raise what the remote method raised (see `wire_format`), PeerTimeout or PeerDied.
    """

    def __init__(
        self,
        protocol: type[T],
        address: str,
        token: str,
        name: str,
        deadline: float = DEADLINE_S,
        deadlines: Mapping[str, float] | None = None,
        max_frame: int = MAX_FRAME,
    ) -> None:
        """deadline: limit of a call in seconds; deadlines: limits by method, which override it."""
        self.name = name
        self._methods, self._token = methods_of(protocol), token.encode()
        _check_seconds("calls", deadline)
        self._deadline, self._deadlines, self._max_frame = deadline, check_deadlines(protocol, deadlines), max_frame
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.DEALER, max_frame)
        self._socket.connect(address)  # bounded: ZeroMQ connects in the background
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[memoryview]] = {}
        self._gone: str | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self.proxy: T = cast(T, _proxy(protocol, self))

    async def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the peer; raises what it raised, PeerTimeout or PeerDied."""
        bound = method.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        payload = serialization.encode(tuple(bound.arguments.values()))
        seconds = self._deadlines.get(method.name, self._deadline)
        raw = await self._request(wire.Call(next(self._ids), method.name), payload, method.name, seconds)
        return serialization.decode(raw, method.result)

    async def hello(self, seconds: float) -> None:
        """Wait for the peer. Raises ValueError when it lacks methods of the protocol."""
        raw = await self._request(wire.Hello(next(self._ids)), b"", "hello", seconds)
        if missing := set(self._methods) - set(serialization.decode(raw, list[str])):
            raise ValueError(f"{self.name} does not serve {', '.join(sorted(missing))}")

    async def ping(self, seconds: float) -> wire.Beat:
        """Ask for a heartbeat. Raises PeerTimeout when the peer's event loop does not answer in time."""
        return serialization.decode(await self._request(wire.Ping(next(self._ids)), b"", "ping", seconds), wire.Beat)

    def died(self, how: str) -> None:
        """Fail every pending and every later call with PeerDied. The first reason is kept."""
        if self._gone is not None:
            return
        self._gone = how
        for future in self._pending.values():
            if not future.done():
                future.set_exception(PeerDied(self.name, how))

    async def close(self) -> None:
        self.died("was disconnected")
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()  # bounded: by the sockets' linger

    async def _request(
        self, request: wire.Call | wire.Hello | wire.Ping, payload: bytes, what: str, seconds: float
    ) -> memoryview:
        if self._gone is not None:
            raise PeerDied(self.name, self._gone)
        if len(payload) > self._max_frame:
            raise ValueError(f"{what}(): arguments of {len(payload)} bytes; at most {self._max_frame} travel to {self.name}")
        future = self._pending[request.id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(request, payload)
            with nullcontext() if isinstance(request, wire.Ping) else waiting(self.name, what, seconds):
                await asyncio.wait({future}, timeout=seconds)
            if future.done():
                return future.result()
            future.cancel()
            await self._send(wire.Cancel(request.id), b"")
            raise PeerTimeout(self.name, what, seconds)
        except asyncio.CancelledError:
            future.cancel()
            if self._gone is None:
                await self._send(wire.Cancel(request.id), b"")
            raise
        finally:
            del self._pending[request.id]

    async def _send(self, request: wire.Request, payload: bytes) -> None:
        try:
            await _send(self._socket, [self._token, serialization.encode(request), payload])
        except zmq.Again:
            self.died("broke the connection")

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)  # bounded: a watch; calls have their own deadlines
            try:
                header, payload = frames
                reply = serialization.decode(header.buffer, wire.Reply)
            except (CodecError, ValueError):  # ValueError: another number of frames
                self.died("sent a reply that is not readable")
                continue
            future = self._pending.get(reply.id)
            if future is None or future.done():
                continue  # the call was cancelled here
            if isinstance(reply, wire.Failed):
                future.set_exception(wire.rebuild(reply, self.name))
            else:
                future.set_result(payload.buffer)


def check_deadlines(protocol: type, deadlines: Mapping[str, float] | None) -> dict[str, float]:
    """Check deadlines by method. Raises ValueError for an unknown method and for an endless wait."""
    if unknown := set(deadlines or {}) - set(methods_of(protocol)):
        raise ValueError(f"deadlines for {sorted(unknown)}: {protocol.__name__} has {sorted(methods_of(protocol))}")
    for method, seconds in (deadlines or {}).items():
        _check_seconds(method, seconds)
    return dict(deadlines or {})


def _check_seconds(what: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"deadline of {what} = {seconds!r}: expected more than 0 seconds, and not for ever")


def _proxy(protocol: type, connection: Connection[Any]) -> object:
    def make(method: Method) -> Any:
        async def call(self: object, *args: Any, **kwargs: Any) -> Any:
            return await connection.call(method, args, kwargs)

        call.__name__ = method.name
        return call

    body: dict[str, Any] = {name: make(method) for name, method in methods_of(protocol).items()}
    body["__repr__"] = lambda self: f"<{protocol.__name__} in {connection.name}>"
    return type(f"{protocol.__name__}Proxy", (), body)()


async def _send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Send without waiting. Raises zmq.Again when there is no connection to send on."""
    await socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=len(frames[-1]) < _NO_COPY)


def _socket(context: zmq.asyncio.Context, kind: int, max_frame: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)  # unlimited: a full queue would drop replies silently; admission bounds them
    return socket
