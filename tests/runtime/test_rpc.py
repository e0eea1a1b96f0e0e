"""The wire: hostile bytes, sizes, tokens, protocols that cannot be served."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from echo_worker import Echo, Echoing
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core import serialization
from tidemill.core.errors import CodecError, PeerDied, PeerTimeout, RemoteError
from tidemill.core.types import SamplingParams
from tidemill.runtime.rpc import Connection, RpcServer
from tidemill.runtime.wire_format import Call, Cancel, Failed, Hello, Reply, methods_of, rebuild

TOKEN = "t" * 64


@asynccontextmanager
async def hosted(address: str = "", **options) -> AsyncIterator[tuple[RpcServer, Connection[Echo], str]]:
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        server = RpcServer(Echoing({"role": "", "name": ""}), Echo, TOKEN, **options)
        address = server.bind(address or f"ipc://{folder}/rpc")
        serving = asyncio.create_task(server.run())
        connection = Connection(Echo, address, TOKEN, "echo", deadline=10, **options)
        try:
            yield server, connection, address
        finally:
            await connection.close()
            server.stop()
            await asyncio.wait_for(serving, 10)


def requests() -> st.SearchStrategy[bytes]:
    real = st.builds(Call, st.integers(0, 50), st.sampled_from(["echo", "describe", "hold", "pid", "__init__", "nope", ""]))
    known = real | st.builds(Cancel, st.integers(0, 50)) | st.builds(Hello, st.integers(0, 50))
    return st.binary(max_size=60) | known.map(serialization.encode)


frames = st.lists(
    st.tuples(st.sampled_from([TOKEN.encode(), b"", b"wrong"]), requests(), st.binary(max_size=60))
    | st.lists(st.just(TOKEN.encode()) | requests(), min_size=1, max_size=6).map(tuple)
    | st.lists(requests(), max_size=5).map(lambda rest: (TOKEN.encode(), *rest)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40)
@given(frames)
def test_hostile_frames_never_stop_the_server(messages: list[tuple[bytes, ...]]) -> None:
    async def attack() -> None:
        async with hosted() as (_, connection, address):
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(address)
            for message in messages:
                await socket.send_multipart(list(message))
            assert (await connection.proxy.echo(np.arange(3))).tolist() == [0, 1, 2]
            socket.close(linger=0)
            context.term()

    asyncio.run(attack())


async def ask(address: str, *frames: bytes, wait_ms: int = 300) -> Reply | None:
    """The reply to raw frames, None when there is none."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        await socket.send_multipart(list(frames))
        if await socket.poll(wait_ms):
            return serialization.decode((await socket.recv_multipart())[0], Reply)
        return None
    finally:
        socket.close(linger=0)
        context.term()


async def test_a_call_that_is_late_is_cancelled_at_the_peer() -> None:
    async with hosted() as (_, connection, address), asyncio.timeout(20):
        hasty = Connection(Echo, address, TOKEN, "echo", deadline=0.2)
        with pytest.raises(PeerTimeout):
            await hasty.proxy.hold("late")
        while await connection.proxy.cancelled() != ["late"]:
            await asyncio.sleep(0.01)
        await hasty.close()


async def test_only_the_token_opens() -> None:
    async with hosted() as (server, connection, address):
        call = serialization.encode(Call(1, "pid")), serialization.encode(())
        assert await ask(address, b"wrong", *call) is None
        assert await ask(address, b"", *call) is None
        assert await ask(address, *call) is None
        assert server.refused == 3
        assert await ask(address, TOKEN.encode(), *call, wait_ms=10_000) is not None
        stranger = Connection(Echo, address, "other", "echo", deadline=0.3)
        with pytest.raises(PeerTimeout):
            await stranger.proxy.pid()
        await stranger.close()
        await connection.proxy.pid()


@pytest.mark.parametrize(
    ("method", "payload"),
    [
        ("nope", b""),
        ("__init__", b""),
        ("spec", b""),
        ("echo", b"\xc1"),
        ("echo", b""),
        ("describe", serialization.encode((1, 2, 3))),
    ],
)
async def test_bad_calls_are_answered_with_an_error(method: str, payload: bytes) -> None:
    async with hosted() as (_, _, address):
        reply = await ask(address, TOKEN.encode(), serialization.encode(Call(1, method)), payload, wait_ms=10_000)
        assert isinstance(reply, Failed)
        assert "ValueError" in reply.kinds


async def test_an_id_in_use_is_refused() -> None:
    async with hosted() as (server, _, address):
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        for key in ("first", "second"):
            await socket.send_multipart(
                [TOKEN.encode(), serialization.encode(Call(7, "hold")), serialization.encode((key,))]
            )
        await socket.send_multipart([TOKEN.encode(), serialization.encode(Call(8, "held")), serialization.encode(())])
        assert serialization.decode((await socket.recv_multipart())[1], list[str]) == ["first"]
        assert server.refused == 1
        await socket.send_multipart([TOKEN.encode(), serialization.encode(Cancel(7)), b""])
        assert isinstance(serialization.decode((await socket.recv_multipart())[0], Reply), Failed)
        socket.close(linger=0)
        context.term()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("user", [0, 65534])
async def test_only_the_same_user_may_connect(user: int) -> None:
    """To a name that everybody can see, and with the right token."""
    program = (
        "import os, sys, zmq\nfrom tidemill.core import serialization\nfrom tidemill.runtime.wire_format import Call\n"
        "address, user = sys.argv[1:]\nsocket = zmq.Context().socket(zmq.DEALER)\nsocket.linger = 0\nos.setuid(int(user))\n"
        "socket.connect(address)\n"
        f"socket.send_multipart([{TOKEN.encode()!r}, serialization.encode(Call(1, 'pid')), serialization.encode(())])\n"
        "print(socket.poll(10_000 if user == '0' else 500))"
    )
    async with hosted(address=f"ipc://@tidemill-{secrets.token_hex(16)}") as (server, _, address):
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, address, str(user), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(asking.communicate(), 60)
        assert asking.returncode == 0 and int(said) == (zmq.POLLIN if user == 0 else 0)
        assert server.refused == 0  # it never got here


async def test_frames_are_bounded_both_ways() -> None:
    async with hosted(max_frame=10_000) as (server, connection, address):
        with pytest.raises(ValueError, match="at most 10000 travel"):
            await connection.proxy.echo(np.zeros(10_000))
        with pytest.raises(ValueError, match=r"returned .* bytes"):
            await connection.proxy.describe("ab", SamplingParams(), 20_000)
        assert await ask(address, TOKEN.encode(), serialization.encode(Call(1, "echo")), bytes(20_000)) is None
        assert (await connection.proxy.echo(np.arange(3))).tolist() == [0, 1, 2]
        assert server.refused == 0  # it never got here


async def test_death_fails_everything_once() -> None:
    async with hosted() as (_, connection, _):
        call = asyncio.create_task(connection.proxy.hold("x"))
        while not await connection.proxy.held():
            pass
        connection.died("was struck by lightning")
        connection.died("was bored")
        for pending in (call, connection.proxy.pid()):
            with pytest.raises(PeerDied, match=r"^echo was struck by lightning$"):
                await pending


async def test_a_peer_that_talks_nonsense_counts_as_dead() -> None:
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(f"ipc://{folder}/rpc")
        connection = Connection(Echo, f"ipc://{folder}/rpc", TOKEN, "echo", deadline=10)
        call = asyncio.create_task(connection.proxy.pid())
        identity = (await router.recv_multipart())[0]
        await router.send_multipart([identity, b"\xc1"])
        with pytest.raises(PeerDied, match="not readable"):
            await call
        await connection.close()
        router.close(linger=0)
        context.term()


async def test_a_reply_above_the_limit_breaks_the_connection_within_the_deadline() -> None:
    """A server of ours never sends one; a caller of ours survives it."""
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        server = RpcServer(Echoing({"role": "", "name": ""}), Echo, TOKEN)
        address = server.bind(f"ipc://{folder}/rpc")
        serving = asyncio.create_task(server.run())
        connection = Connection(Echo, address, TOKEN, "echo", deadline=0.5, max_frame=1000)
        async with asyncio.timeout(20):
            with pytest.raises(PeerTimeout):
                await connection.proxy.describe("ab", SamplingParams(), 2000)
            for _ in range(3):
                with pytest.raises((PeerDied, PeerTimeout)):
                    await connection.proxy.pid()
            await connection.close()
            server.stop()
            await serving


async def test_hello_compares_the_methods() -> None:
    class More(Echo, Protocol):
        async def more(self) -> None: ...

    async with hosted() as (_, connection, address):
        await connection.hello(5)
        other = Connection(More, address, TOKEN, "echo")
        with pytest.raises(ValueError, match="echo does not serve more"):
            await other.hello(5)
        await other.close()


async def test_pending_calls_are_answered_when_the_server_closes() -> None:
    async with hosted() as (_, connection, _):
        call = asyncio.create_task(connection.proxy.hold("x"))
        while not await connection.proxy.held():
            pass
        await connection.proxy.close()
        with pytest.raises(RemoteError, match="CancelledError"):
            await call


def test_protocols_that_cannot_be_served_are_refused() -> None:
    class Sync(Protocol):
        def now(self) -> int: ...

    class Untyped(Protocol):
        async def put(self, x) -> int: ...

    class Loose(Protocol):
        async def put(self, *x: int) -> int: ...

    class Silent(Protocol):
        async def put(self, x: int): ...

    for protocol, why in ((Sync, "async"), (Untyped, "type"), (Loose, "plain"), (Silent, "returns")):
        with pytest.raises(TypeError, match=why):
            methods_of(protocol)


def test_every_protocol_of_ours_can_be_served() -> None:
    from tidemill.core.interfaces import Engine, Trainer

    assert "generate" in methods_of(Engine)
    for protocol in (Engine, Trainer):
        for method in methods_of(protocol).values():
            for kind in (method.arguments, method.result):
                with pytest.raises(CodecError):
                    serialization.decode(b"\xc1", kind)


def test_unknown_failures_are_rebuilt_without_running_anything() -> None:
    error = rebuild(Failed(0, ["SystemExit", "BaseException"], "x", "trace"), "peer")
    assert isinstance(error, RemoteError)
    assert isinstance(rebuild(Failed(0, [], "x", ""), "peer"), RemoteError)
    assert msgspec.structs.asdict(Failed(1, ["A"], "m", "t"))["id"] == 1
