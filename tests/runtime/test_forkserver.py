"""The process that roles are forked from: it ends with its controller, they end with it, and are like any others."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from echo_worker import WITHOUT_THE_KERNEL, WORKER, Echo, Start

from tidemill.core import fault_injection
from tidemill.core.errors import PeerDied, PeerTimeout, StartFailed
from tidemill.runtime import fork_client
from tidemill.runtime.fork_client import server_environment
from tidemill.runtime.fork_server import (
    LENGTH,
    MOST,
    Forked,
    ForkRequest,
    Launch,
    Notice,
    ProcessEnded,
    Reap,
    Request,
    Serving,
    frame,
)
from tidemill.runtime.local import Local

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def server_of(handle) -> psutil.Process:
    server = psutil.Process(handle.pid).parent()
    assert server is not None and server.ppid() == os.getpid()
    return server


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


# --- as a user of `Local` sees it ----------------------------------------------------------------------------------------


async def test_one_server_forks_all(start: Start) -> None:
    first, second = await asyncio.gather(start(), start(name="engine-1"))
    server = server_of(first)
    assert server_of(second).pid == server.pid and os.getsid(server.pid) == server.pid  # Ctrl-C reaches neither
    await first.stop()
    again = await start()
    assert server_of(again).pid == server.pid
    await until(lambda: {child.pid for child in server.children()} == {second.pid, again.pid})  # the first was reaped


async def test_many_that_end_at_once_are_all_noticed(start: Start) -> None:
    children = [await start(name=f"engine-{i}") for i in range(4)]
    server = server_of(children[0])
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    for child in children:
        assert "died: killed by SIGKILL" in await asyncio.wait_for(child.wait(), 10)
    await until(lambda: not server.children())


@pytest.mark.parametrize("command", [WORKER, WITHOUT_THE_KERNEL], ids=["kernel", "polled"])
async def test_when_the_server_dies_so_do_all_and_the_next_start_makes_another(start: Start, command: list[str]) -> None:
    start = partial(start, command=command)
    first, second = await start(), await start(name="engine-1")
    processes, server = [psutil.Process(each.pid) for each in (first, second)], server_of(first)
    call = asyncio.create_task(first.proxy.hold("x"))
    while not await first.proxy.held():
        pass
    server.kill()
    for each, name in ((call, "engine-0 "), (second.wait(), "")):
        try:
            told = await asyncio.wait_for(each, 10)
        except PeerDied as died:
            told = str(died)
        assert told.startswith(f"{name}died: the fork server died: killed by SIGKILL; its log: "), told
    assert all(map(ended, processes)), "they are not said to have ended before they have"
    assert "the fork server died" in await first.stop()
    third = await start()
    assert server_of(third).pid != server.pid and await third.proxy.pid() == third.pid


async def test_a_server_that_was_stopped_is_named_and_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await start()
    server = server_of(first)
    monkeypatch.setattr(fork_client, "FORK_S", 0.3)
    server.suspend()
    with pytest.raises(PeerTimeout, match=r"^the fork server did not answer fork\(\) within 0.3 s$"):
        await start(name="engine-1")
    monkeypatch.undo()
    second = await start(name="engine-1")
    assert server_of(second).pid != server.pid and await second.proxy.pid() == second.pid
    assert "the fork server did not answer fork() within 0.3 s and was killed" in await asyncio.wait_for(first.wait(), 10)
    assert ended(server)


async def test_an_end_that_the_server_does_not_tell_is_found_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = await start()
    monkeypatch.setattr(fork_client, "NOTICE_S", 0.2)
    server_of(child).suspend()
    child.kill("was asked to go")
    assert (await asyncio.wait_for(child.wait(), 10)).startswith("was asked to go")
    assert child._process._ended.result() == (
        "the fork server did not say within 0.2 s that a process had ended, and was killed"
    )


async def test_a_start_that_was_cancelled_leaves_nobody(start: Start) -> None:
    first = await start()
    server = server_of(first)
    server.suspend()
    starting = asyncio.create_task(start({"start": "hangs"}, name="engine-1"))  # it would never end by itself
    await until(lambda: "engine-1.log" in os.listdir(first._log.path.parent))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    server.resume()
    second = await start(name="engine-2")  # asked for after it, so forked after it
    await until(lambda: {child.pid for child in server.children()} == {first.pid, second.pid})


ARENAS = """
import ctypes, threading
kept, meet = [], threading.Barrier(4)

def takes():
    meet.wait(20)
    kept.append(bytearray(100_000))
    meet.wait(20)

threads = [threading.Thread(target=takes) for _ in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no such arenas")
@pytest.mark.parametrize("own", [None, "3"])
def test_what_one_thread_has_given_back_another_may_take(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if own is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", own)
    told = subprocess.run(
        [sys.executable, "-c", ARENAS], env=server_environment(), capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("<heap nr=") == int(own or 1)  # a user's own word stands


async def test_a_child_has_the_environment_and_the_folder_of_the_time_of_its_start(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEMILL_TEST", "before")
    first = await start()
    monkeypatch.delenv("TIDEMILL_TEST")
    monkeypatch.setenv("TIDEMILL_LATER", "after")
    monkeypatch.setitem(os.environ, "TIDEMILL_ODD", "\udcff")  # a byte that is no text
    monkeypatch.setenv(fault_injection.VARIABLE, "engine-0:here:*:kill")
    monkeypatch.setenv(fault_injection.LOG_VARIABLE, str(tmp_path / "faults"))
    monkeypatch.chdir(tmp_path)
    second = await start(name="engine-1")
    variables = [
        await each.proxy.environment(key) for each in (first, second) for key in ("TIDEMILL_TEST", "TIDEMILL_LATER")
    ]
    assert variables == ["before", "", "", "after"]
    assert Path(psutil.Process(second.pid).cwd()) == tmp_path != Path(psutil.Process(first.pid).cwd())
    await first.proxy.reach("here")  # it has no faults, though its server's controller has by now
    with pytest.raises(PeerDied, match="SIGKILL"):
        await second.proxy.reach("here")
    assert (tmp_path / "faults").read_text() == "engine-0:here:*:kill\n"


@linux
async def test_a_child_has_nothing_of_the_servers(start: Start) -> None:
    await start(name="engine-1")
    child = await start()
    servers = {os.readlink(each) for each in Path(f"/proc/{server_of(child).pid}/fd").iterdir()} - {os.devnull}
    assert any(each.startswith("socket:") for each in servers) and any("forkserver.log" in each for each in servers)
    mine = await child.proxy.descriptors()
    assert not servers & set(mine) and not any("engine-1" in each for each in mine)
    assert not any(each.startswith("pipe:") for each in mine)  # what it reported on
    assert mine.count(str(child._log.path)) == 2 and str(Path.cwd()) not in mine
    assert [os.readlink(f"/proc/{child.pid}/fd/{number}") for number in range(3)] == [
        os.devnull,
        *[str(child._log.path)] * 2,
    ]


async def test_close_ends_what_was_not_stopped_and_starts_that_wait(tmp_path: Path, temporary: Path) -> None:
    placement = Local(tmp_path / "logs", WORKER)
    placement.begin()
    child = await placement.start(Echo, "engine", "engine-0", {})
    process, server = psutil.Process(child.pid), server_of(child)
    server.suspend()
    starting = asyncio.create_task(placement.start(Echo, "engine", "engine-1", {}))
    await until(lambda: (tmp_path / "logs" / "engine-1.log").exists())
    await placement.close()
    with pytest.raises(StartFailed, match="engine-1 did not start: the fork server was closed"):
        await starting
    assert ended(process) and ended(server) and "the fork server was closed" in await child.wait()
    await child.stop()
    await placement.close()
    with pytest.raises(AssertionError):
        placement.begin()


# --- servers that cannot -------------------------------------------------------------------------------------------------

MODULE = """
import os, socket, sys, threading
from tidemill.runtime.role_host import host
def preload():
{preload}
host(lambda spec: None, preload)
"""


@pytest.mark.parametrize(
    ("preload", "expected"),
    [
        ("    import nothing_of_this_name", r"exit status 1; its log: .*forkserver.log\n(.|\n)*nothing_of_this_name"),
        ("    threading.Thread(target=threading.Event().wait, daemon=True).start()", "cannot fork: 2 threads"),
        ("    def fork(): raise OSError(11, 'too many')\n    os.fork = fork", "refused to fork: .*too many"),
        ("    os.write(channel(), b'\\xff' * 4)", r"not readable \(4294967295 bytes"),
        ("    os.write(channel(), b'\\0\\0\\0\\x02{]')", "sent a message that is not readable"),
        ('    os.write(channel(), b\'\\0\\0\\0\\x1c{"type":"ended","pid":-1}  \')', "sent a message that is not readable"),
        ("    os.write(channel(), b'\\0\\0'); os._exit(3)", "the fork server died: exit status 3"),
        ("    os.close(channel()); threading.Event().wait(60)", "the fork server closed its channel and was killed"),
    ],
    ids=["import", "thread", "fork", "long", "nonsense", "pid", "half", "closed"],
)
async def test_a_server_that_cannot_fork_says_why(start: Start, tmp_path: Path, preload: str, expected: str) -> None:
    channel = "    def channel(): return next(int(n) for n in os.listdir('/dev/fd') if int(n) > 2 and is_socket(int(n)))\n"
    channel += "    is_socket = lambda n: os.path.exists(f'/dev/fd/{n}') and os.stat(n).st_mode & 0o170000 == 0o140000\n"
    command = [sys.executable, "-c", MODULE.format(preload=channel + preload)]
    with pytest.raises(StartFailed, match=f"^engine-0 did not start: (.|\n)*{expected}"):
        await start(command=command)


async def test_the_time_that_imports_take_is_part_of_a_start(start: Start) -> None:
    command = [sys.executable, "-c", MODULE.format(preload="    threading.Event().wait(60)")]
    with pytest.raises(PeerTimeout, match=r"^the fork server did not answer start\(\) within 0.2 s$"):
        await start(command=command, start_deadline=0.2)


def test_by_hand_it_says_what_it_is() -> None:
    done = subprocess.run(WORKER, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "not by hand" in done.stderr


# --- what is said on its channel -----------------------------------------------------------------------------------------


class Talk:
    """One side of a server's channel."""

    def __init__(self, ours: socket.socket, process: subprocess.Popen[str]) -> None:
        self.socket, self.process = ours, process

    def say(self, message: Request, descriptors: list[int]) -> None:
        raw = frame(message)
        socket.send_fds(self.socket, [raw[:LENGTH]], descriptors)
        self.socket.sendall(raw[LENGTH:])

    def hear(self) -> Notice:
        length = int.from_bytes(self.socket.recv(LENGTH, socket.MSG_WAITALL), "big")
        return msgspec.msgpack.decode(self.socket.recv(length, socket.MSG_WAITALL), type=Notice)


@pytest.fixture
def talk() -> Iterator[Talk]:
    with talking() as made:
        yield made


@contextmanager
def talking() -> Iterator[Talk]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with (
        ours,
        subprocess.Popen(WORKER, stdin=theirs, stderr=subprocess.PIPE, text=True, env=server_environment()) as process,
    ):
        theirs.close()
        talk = Talk(ours, process)
        try:
            assert talk.hear() == Serving()
            yield talk
        finally:
            process.kill()


def descriptors(folder: Path) -> list[int]:
    flags = os.O_WRONLY | os.O_CREAT
    return [os.open(folder / "report", flags), os.open(folder / "log", flags), os.open(folder, os.O_RDONLY)]


def launch(start: str = "") -> Launch:
    return Launch(os.getpid(), "token", "engine", "engine-0", {"start": start})


def test_a_process_is_reaped_when_the_controller_knows_of_its_end_and_not_before(talk: Talk, tmp_path: Path) -> None:
    pids: dict[str, int] = {}
    for key, start in enumerate(("killed", "value")):
        talk.say(ForkRequest(key, launch(start), None, []), descriptors(tmp_path))
        forked = talk.hear()
        assert isinstance(forked, Forked) and forked.id == key
        pids[start] = forked.pid
        assert talk.hear() == ProcessEnded(forked.pid, -signal.SIGKILL if start == "killed" else 1)
    assert all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids.values())
    talk.say(Reap(pids["value"]), [])
    talk.say(Reap(pids["value"]), [])  # said twice, and of nobody: it goes on
    talk.say(Reap(12345678), [])
    talk.say(ForkRequest(2, launch("value"), None, []), descriptors(tmp_path))
    assert isinstance(talk.hear(), Forked)
    assert not psutil.pid_exists(pids["value"]) and psutil.Process(pids["killed"]).status() == psutil.STATUS_ZOMBIE


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH, "big") + body


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ((MOST + 1).to_bytes(LENGTH, "big"), "at most"),
        (_framed(b"\xff{"), "not readable"),
        (_framed(b'{"type":"reap","pid":0}'), "not readable"),
        (frame(ForkRequest(0, launch(), None, [])), "0 descriptors with a Fork, expected 3"),
    ],
    ids=["long", "nonsense", "pid", "descriptors"],
)
def test_what_it_cannot_read_ends_it(talk: Talk, raw: bytes, expected: str) -> None:
    talk.socket.sendall(raw)
    _, errors = talk.process.communicate(timeout=20)
    assert talk.process.returncode == 1 and expected in errors


def test_the_end_of_its_channel_ends_it_and_its_children(talk: Talk, tmp_path: Path) -> None:
    talk.say(ForkRequest(0, launch("hangs"), None, []), descriptors(tmp_path))
    forked = talk.hear()
    assert isinstance(forked, Forked)
    child = psutil.Process(forked.pid)
    talk.socket.close()
    assert talk.process.wait(20) == 0
    limit = time.monotonic() + 20
    while not ended(child):
        assert time.monotonic() < limit
