"""Client of the fork server: starts it, asks it to fork, learns how its children ended.

Every request to the server has a deadline, and a server that misses one is killed. Its children die with it, and are
reported as ended only once they have. The controller learns of a child's end before the child is reaped, and sends no
signal after that. The socket has no name, so no other process can connect to it.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from tidemill.core.errors import PeerTimeout, StartFailed
from tidemill.observability.stall_report import waiting
from tidemill.runtime import fork_server
from tidemill.runtime.fork_server import LENGTH, ForkRequest, Launch, frame
from tidemill.runtime.placement import Resources
from tidemill.runtime.process_logs import Log, describe

T = TypeVar("T")
NAME = "the fork server"
FORK_S = 30.0  # limit of one fork, which takes milliseconds: the server does nothing else
NOTICE_S = 5.0  # limit for the server to report that a child has ended
KILL_S = 10.0  # limit for the kernel to end a process that was sent SIGKILL
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_LAST_S = 1.0  # from the end of the server's channel to the end of the server
_LOOK_S = 0.01
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
_THREADLESS = {"OPENBLAS_NUM_THREADS": "1", "BLIS_NUM_THREADS": "1", "GOTO_NUM_THREADS": "1"}


def role_environment() -> dict[str, str]:
    """Environment of a role: OpenMP threads sleep while they wait, and share one malloc arena."""
    # Two threads that spin on a shared core are five times slower. With an arena each, a trainer of 0.3 GB keeps 50 MB more.
    return {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"} | os.environ


def server_environment() -> dict[str, str]:
    """Environment of the fork server: libraries start no threads on import, for then it could not fork."""
    return role_environment() | _THREADLESS


def _environment_of(resources: Resources) -> dict[str, str]:
    """Variables that give a role its threads and its device."""
    found = {name: str(resources.threads) for name in _THREADS if resources.threads}
    if resources.device:
        number, seen = int(resources.device.removeprefix("cuda:")), os.environ.get(VISIBLE_DEVICES)
        found[VISIBLE_DEVICES] = seen.split(",")[number].strip() if seen else str(number)
    return found


class ForkedProcess:
    """A process that the server forked."""

    def __init__(self, pid: int, untold: Callable[[], None]) -> None:
        """untold: called when the process was ended by SIGKILL and the server did not report that."""
        self.pid, self._untold = pid, untold
        self.orphaned = False  # the server is gone: the process ends, and the system may reap it at any time
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._process = psutil.Process(pid)  # compares the start time too: a later process of the same id is another one
        except psutil.NoSuchProcess:
            self._process = None

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)  # bounded: by the server's end, and that by `ForkServer.close`

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group; none once its end is known, when others may have its id."""
        if self.orphaned or self._ended.done():
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # just forked, not yet the leader of a group
                os.kill(self.pid, number)
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(NOTICE_S, self._look)

    def ended(self, how: str) -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    def running(self) -> bool:
        """Ask the system if the process still runs (a zombie does not)."""
        try:
            return self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill_orphan(self) -> None:
        """Kill the process unless its id belongs to another by now (psutil compares start times)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.kill()

    def _look(self) -> None:
        if self._ended.done():
            return
        if self.running():  # the kernel is still freeing its memory
            asyncio.get_running_loop().call_later(NOTICE_S, self._look)
        else:
            self._untold()


class ForkServer:
    """One server process, from start to end; `gone` says how it ended. It belongs to the running event loop."""

    def __init__(self, command: Sequence[str], log: Log) -> None:
        loop = asyncio.get_running_loop()
        self.gone, self._log, self._killed = "", log, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._serving: asyncio.Future[str] = loop.create_future()  # "" once it serves, else why it does not
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

    async def fork(self, launch: Launch, report: int, log: Path, resources: Resources, seconds: float) -> ForkedProcess:
        """Fork a child that runs `launch` in this process's folder and environment. report: its pipe, a descriptor.

        Raises StartFailed when the server cannot fork, and PeerTimeout when it is not ready within `seconds` or does not
        answer; the server is then killed.
        """
        if why := await self._answer(self._serving, "start", seconds):
            raise StartFailed(f"{launch.name} did not start: {why}")
        if self.gone:
            raise StartFailed(f"{launch.name} did not start: {self.gone}")
        key, answer = next(self._ids), asyncio.get_running_loop().create_future()
        environment = role_environment() | _environment_of(resources)
        variables = [(os.fsencode(name), os.fsencode(value)) for name, value in environment.items()]
        self._asked[key] = answer
        try:
            with open(log, "ab") as output, contextlib.ExitStack() as after:
                after.callback(os.close, folder := os.open(".", os.O_RDONLY))
                self._send(ForkRequest(key, launch, resources.threads, variables), [report, output.fileno(), folder])
            child = await self._answer(answer, "fork", min(seconds, FORK_S))
        except BaseException:  # the caller has left: nobody else would end the child
            if answer.done() and isinstance(child := answer.result(), ForkedProcess):
                child.signal(signal.SIGKILL)
            raise
        finally:
            del self._asked[key]
        if isinstance(child, str):
            raise StartFailed(f"{launch.name} did not start: {child}")
        return child

    def kill(self, why: str) -> None:
        """Kill the server with all its children; `gone` will then say why."""
        self._killed = self._killed or why
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def close(self) -> None:
        """Kill the server and wait for its end. Safe to call again. Raises PeerTimeout when the kernel does not end it."""
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

    # --- the server's life ---

    async def _live(self, command: Sequence[str], theirs: socket.socket) -> None:
        how = ""
        try:
            with theirs:
                self._process = self._start(command, theirs)
            await self._listen()
            for child in self._children.values():
                child.orphaned = True
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
        # Without asyncio, which would reap it in another thread: a signal must never reach an id that was given to another.
        with open(self._log.path, "ab") as output:
            return subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C must reach the controller alone
                env=server_environment(),
            )

    async def _reaped(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < limit:
            await asyncio.sleep(_LOOK_S)

    async def _end(self, how: str) -> None:
        """Wait for the children to end with the server, then report their end and fail open requests."""
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

    # --- messages ---

    async def _listen(self) -> None:
        try:
            while True:
                length = int.from_bytes(await self._exactly(LENGTH), "big")
                if length > fork_server.MOST:
                    raise ValueError(f"{length} bytes, at most {fork_server.MOST} are taken")
                self._hear(msgspec.msgpack.decode(await self._exactly(length), type=fork_server.Notice))
        except (EOFError, OSError):
            return
        except ValueError as error:  # msgspec's among them
            self._killed = self._killed or f"sent a message that is not readable ({error}) and was killed"

    def _hear(self, notice: fork_server.Notice) -> None:
        match notice:
            case fork_server.Serving():
                if not self._serving.done():
                    self._serving.set_result("")
            case fork_server.Forked(key, pid):
                child = self._children[pid] = ForkedProcess(pid, self._untold)
                self._tell(key, child)
            case fork_server.ForkRefused(key, why):
                self._tell(key, why)
            case fork_server.ProcessEnded(pid, code):
                if child := self._children.pop(pid, None):
                    child.ended(describe(code))
                self._send(fork_server.Reap(pid))  # last: until it is reaped, nobody else can get its id

    def _tell(self, key: int, answer: ForkedProcess | str) -> None:
        future = self._asked.get(key)
        if future is not None and not future.done():
            future.set_result(answer)
        elif isinstance(answer, ForkedProcess):
            answer.signal(signal.SIGKILL)  # the caller has left

    def _untold(self) -> None:
        self.kill(f"did not say within {NOTICE_S:g} s that a process had ended, and was killed")

    async def _exactly(self, size: int) -> bytes:
        data, loop = bytearray(), asyncio.get_running_loop()
        while len(data) < size:
            more = await loop.sock_recv(self._socket, size - len(data))  # a watch: requests have deadlines
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _send(self, message: fork_server.Request, descriptors: Sequence[int] = ()) -> None:
        """Queue a message and copies of descriptors; it goes out whole even if the caller is cancelled."""
        self._outgoing.append((memoryview(frame(message)), [os.dup(each) for each in descriptors]))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._outgoing:
                data, descriptors = self._outgoing[0]
                if descriptors:  # the server receives them with the head, so send them with it
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
        except OSError:  # the server is gone, which `_live` reports
            loop.remove_writer(self._socket)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
