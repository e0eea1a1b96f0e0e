"""The controller's side of the fork server: start it, have it fork, hear how its children ended.

    ForkServer(command, log)   its imports begin    await fork(launch, ...) -> Child    await child.wait() -> how it ended

Every question to the server has a deadline, and a server that misses one is killed: its children die with it, and are not
said to have ended before they have. A child's end is known before it is reaped, and nothing is signalled after that. The
descriptors that a child needs travel with the question; the socket has no name that anybody else could connect to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import psutil

from tidemill.observability.stall_report import waiting
from tidemill.runtime.fork_server import (
    LENGTH,
    MOST,
    Forked,
    ForkRefused,
    ForkRequest,
    Launch,
    Notice,
    ProcessEnded,
    Reap,
    Request,
    Serving,
    frame,
)
from tidemill.runtime.placement import StartFailed
from tidemill.runtime.process_logs import Log, describe
from tidemill.runtime.wire_format import PeerTimeout

T = TypeVar("T")
NAME = "the fork server"
FORK_S = 30.0  # for a fork, which takes milliseconds: the server has nothing else to do
NOTICE_S = 5.0  # to say that a child which has ended has ended
KILL_S = 10.0  # for the kernel to end a process that was sent SIGKILL
_LAST_S = 1.0  # from the end of its channel to its own
_LOOK_S = 0.01
_THREADLESS = {"OPENBLAS_NUM_THREADS": "1", "BLIS_NUM_THREADS": "1", "GOTO_NUM_THREADS": "1"}


def role_environment() -> dict[str, str]:
    """Threads that wait for one another sleep: spinning, two of them are five times slower on a shared core. And what one
    has given back another may take: with an arena of glibc's for each, a trainer of 0.3 GB keeps 50 MB more."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"} | os.environ


def server_environment() -> dict[str, str]:
    """Libraries that begin a pool of threads when they are imported begin none, or nothing could be forked."""
    return role_environment() | _THREADLESS


class ForkedProcess:
    """A process that the server forked."""

    def __init__(self, pid: int, untold: Callable[[], None]) -> None:
        """untold: is called when it has ended by SIGKILL and the server did not say so."""
        self.pid, self._untold, self._orphaned = pid, untold, False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._process = psutil.Process(pid)  # known by its start too, so never taken for a later one of the same id
        except psutil.NoSuchProcess:
            self._process = None

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> str:
        """How it ended, once it has."""
        return await asyncio.shield(self._ended)  # bounded: by the server's end, and that by `ForkServer.close`

    def signal(self, number: int) -> None:
        """To it and whatever it started in its session. Only until its end is known, for then its id may be another's."""
        if self._orphaned or self._ended.done():
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # just forked: it leads no group yet
                os.kill(self.pid, number)
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(NOTICE_S, self._look)

    def orphaned(self) -> None:
        """Its parent has gone: it ends, and whoever reaps it asks nobody."""
        self._orphaned = True

    def ended(self, how: str) -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    def running(self) -> bool:
        """By the system's word."""
        try:
            return self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill_orphan(self) -> None:
        """Its id may be another's by now: the time of its start decides whether it is."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.kill()

    def _look(self) -> None:
        if self._ended.done():
            return
        if self.running():  # in the kernel, giving back its memory
            asyncio.get_running_loop().call_later(NOTICE_S, self._look)
        else:
            self._untold()


class ForkServer:
    """One server process, from its start to its end; `gone` says how it ended. Needs a running loop, and belongs to it."""

    def __init__(self, command: Sequence[str], log: Log) -> None:
        loop = asyncio.get_running_loop()
        self.gone, self._log, self._killed = "", log, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._serving: asyncio.Future[str] = loop.create_future()  # its result: why not
        self._asked: dict[int, asyncio.Future[ForkedProcess | str]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._ids = itertools.count()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._living = loop.create_task(self._live(command, theirs))

    @property
    def usable(self) -> bool:
        return not self.gone and not self._killed

    async def fork(
        self, launch: Launch, descriptors: list[int], threads: int | None, more: Mapping[str, str], seconds: float
    ) -> ForkedProcess:
        """A child that has begun to be `launch`. descriptors: for its report, of its log, of its working directory.

        Its environment is this process's, and `more`. Raises StartFailed when there can be none, PeerTimeout when the server
        is not ready within `seconds`, or does not answer; it is then killed.
        """
        if why := await self._answer(self._serving, "start", seconds):
            raise StartFailed(f"{launch.name} did not start: {why}")
        if self.gone:
            raise StartFailed(f"{launch.name} did not start: {self.gone}")
        key, answer = next(self._ids), asyncio.get_running_loop().create_future()
        variables = [(os.fsencode(name), os.fsencode(value)) for name, value in {**role_environment(), **more}.items()]
        self._asked[key] = answer
        try:
            self._send(ForkRequest(key, launch, threads, variables), descriptors)
            child = await self._answer(answer, "fork", min(seconds, FORK_S))
        except BaseException:  # whoever asked has left: nobody would ever end it
            if answer.done() and isinstance(child := answer.result(), ForkedProcess):
                child.signal(signal.SIGKILL)
            raise
        finally:
            del self._asked[key]
        if isinstance(child, str):
            raise StartFailed(f"{launch.name} did not start: {child}")
        return child

    def kill(self, why: str) -> None:
        """End it now, with all of its children; `gone` will then say why."""
        self._killed = self._killed or why
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def close(self) -> None:
        """Safe to call again. Raises PeerTimeout when the kernel does not end it."""
        self.kill("was closed")
        done, _ = await asyncio.wait({self._living}, timeout=2 * KILL_S)
        if not done:
            raise PeerTimeout(NAME, "SIGKILL", 2 * KILL_S)

    async def _answer(self, future: asyncio.Future[T], what: str, seconds: float) -> T:
        with waiting(NAME, what, seconds):
            await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            self.kill(f"did not answer {what}() within {seconds:g} s and was killed")
            raise PeerTimeout(NAME, what, seconds)
        return future.result()

    # --- its life ---

    async def _live(self, command: Sequence[str], theirs: socket.socket) -> None:
        how = ""
        try:
            with theirs:
                self._process = self._start(command, theirs)
            await self._listen()
            for child in self._children.values():
                child.orphaned()
            await self._reaped(self._process, _LAST_S)
        except OSError as error:
            how = f"could not be started: {error}"
        except asyncio.CancelledError:
            self.kill("was stopped with its event loop")
            raise
        finally:
            if (process := self._process) is not None:
                if process.poll() is None:
                    self.kill("closed its channel and was killed")
                    await self._reaped(process, KILL_S)
                how = self._killed or f"died: {describe(process.returncode)}"
            await self._end(how or self._killed)

    def _start(self, command: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Not by asyncio: another thread would reap it, and then a signal could be one too many. `_live` alone does."""
        with open(self._log.path, "ab") as output:
            return subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the controller alone
                env=server_environment(),
            )

    async def _reaped(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < limit:
            await asyncio.sleep(_LOOK_S)

    async def _end(self, how: str) -> None:
        """Its children end with it, by the kernel's word or within half a second. Only then is it said that they have."""
        children, self._children = list(self._children.values()), {}
        limit = time.monotonic() + KILL_S
        self.gone = f"{NAME} {how}"
        try:
            for child in children:
                child.kill_orphan()
            while any(child.running() for child in children) and time.monotonic() < limit:
                await asyncio.sleep(_LOOK_S)
        finally:
            for child in children:
                child.ended(self.gone)
            why = f"{self.gone}; {self._log.tail()}"
            for future in [self._serving, *self._asked.values()]:
                if not future.done():
                    future.set_result(why)
            asyncio.get_running_loop().remove_writer(self._socket)
            self._socket.close()
            while self._outgoing:
                _close(self._outgoing.popleft()[1])

    # --- what is said ---

    async def _listen(self) -> None:
        """Until the end of the channel, or of its sense."""
        try:
            while True:
                length = int.from_bytes(await self._exactly(LENGTH), "big")
                if length > MOST:
                    raise ValueError(f"{length} bytes, at most {MOST} are taken")
                self._hear(msgspec.msgpack.decode(await self._exactly(length), type=Notice))
        except (EOFError, OSError):
            return
        except ValueError as error:  # msgspec's among them
            self._killed = self._killed or f"sent a message that is not readable ({error}) and was killed"

    def _hear(self, notice: Notice) -> None:
        match notice:
            case Serving():
                if not self._serving.done():
                    self._serving.set_result("")
            case Forked(key, pid):
                child = self._children[pid] = ForkedProcess(pid, self._untold)
                self._tell(key, child)
            case ForkRefused(key, why):
                self._tell(key, why)
            case ProcessEnded(pid, code):
                if child := self._children.pop(pid, None):
                    child.ended(describe(code))
                self._send(Reap(pid))  # only now, for until it is reaped its id is its own

    def _tell(self, key: int, answer: ForkedProcess | str) -> None:
        future = self._asked.get(key)
        if future is not None and not future.done():
            future.set_result(answer)
        elif isinstance(answer, ForkedProcess):
            answer.signal(signal.SIGKILL)  # whoever asked has left

    def _untold(self) -> None:
        self.kill(f"did not say within {NOTICE_S:g} s that a process had ended, and was killed")

    async def _exactly(self, size: int) -> bytes:
        data, loop = bytearray(), asyncio.get_running_loop()
        while len(data) < size:
            more = await loop.sock_recv(self._socket, size - len(data))  # a watch: questions have deadlines
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _send(self, message: Request, descriptors: Sequence[int] = ()) -> None:
        """In order and whole, whatever becomes of the one who asked. Copies of the descriptors go with the first byte."""
        raw = frame(message)
        self._outgoing.append((memoryview(raw), [os.dup(each) for each in descriptors]))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._outgoing:
                data, descriptors = self._outgoing[0]
                if descriptors:  # the server reads them with the head, so that is what takes them along
                    sent = socket.send_fds(self._socket, [data[:LENGTH]], descriptors, socket.MSG_DONTWAIT)
                else:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                _close(descriptors)
                self._outgoing[0] = data[sent:], []
                if sent == len(data):
                    self._outgoing.popleft()
            loop.remove_writer(self._socket)
        except BlockingIOError:
            loop.add_writer(self._socket, self._flush)
        except OSError:  # it has gone, which `_live` tells
            loop.remove_writer(self._socket)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
