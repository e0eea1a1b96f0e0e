"""Local placement: roles as processes of this machine, started, watched and always reaped.

    start       the fork server forks a child -> it builds, reports on a pipe -> connection -> proxy
    watcher     the process ended -> every pending call fails with PeerDied, naming the signal and the end of the log
    heartbeats  a process that is silent, stopped, or without progress in a call is killed
    stop        close() -> SIGTERM -> SIGKILL

A child leads a session of its own, so that Ctrl-C reaches the controller alone. It dies with the fork server, and the fork
server with the thread that started it: start roles from a thread that lives as long as the run. The socket's folder is
removed once connected, so nothing is left behind however the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import psutil

from tidemill.core import serialization
from tidemill.core.errors import CodecError, PeerDied, PeerTimeout, RemoteError, StartFailed
from tidemill.core.memory import anonymous_memory
from tidemill.runtime.fork_client import KILL_S, ForkedProcess, ForkServer
from tidemill.runtime.fork_server import Launch
from tidemill.runtime.placement import Liveness, Resources, RoleGroup, Vitals
from tidemill.runtime.process_logs import Log
from tidemill.runtime.role_host import REPORT_LENGTH, Ready, Report
from tidemill.runtime.rpc import Connection, check_deadlines
from tidemill.runtime.wire_format import Beat, rebuild
from tidemill.runtime.workers import stopped
from tidemill.runtime.workers.stopped import stopped_instead

T = TypeVar("T")
MODULE = "tidemill.run.role_main"
START_S = 120.0  # a cold import of torch from a network disk is slow
_PIPE_S = 1.0  # limit for reading what a process wrote before it ended
_STACKS_S = 0.5  # time for a process to write the stacks of all its threads
_MOST_REPORT = 1 << 20  # bytes


class LocalProcess(Generic[T]):
    """A running child. Made by `Local.start`."""

    def __init__(self, connection: Connection[T], process: ForkedProcess, log: Log, liveness: Liveness | None) -> None:
        self.name, self.pid, self._log = connection.name, process.pid, log
        self._connection, self._process = connection, process
        self._stopping, self._killed = "", ""
        self._beat, self._heard = Beat(0.0, []), time.monotonic()
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._watch())
        self._listening = loop.create_task(self._listen(liveness)) if liveness else None

    @property
    def proxy(self) -> T:
        return self._connection.proxy

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def wait(self) -> str:
        return await asyncio.shield(self._watching)  # bounded: until `stop`, for those who want to know

    def vitals(self) -> Vitals:
        return Vitals(self.name, self.pid, self.alive, time.monotonic() - self._heard, self._beat.progress, self._beat.busy)

    def kill(self, why: str) -> None:
        self._killed = self._killed or why
        self._process.signal(signal.SIGKILL)

    async def stop(self, deadline: float = 10.0) -> str:
        """End the process: close() in half of `deadline`, an exit or SIGTERM in a quarter each, then SIGKILL."""
        self._stopping = self._stopping or "was stopped"
        try:
            if hasattr(self.proxy, "close") and self.alive and await self._closes(deadline / 2):
                await self._ended(deadline / 4)
            self._process.signal(signal.SIGTERM)  # a no-op if it has ended by now
            if not await self._ended(deadline / 4):
                self._stopping += f"; it did not end within {deadline:g} s and was killed"
                self._process.signal(signal.SIGKILL)
        finally:  # also when this call is cancelled: no process keeps running
            if self._listening is not None:
                self._listening.cancel()
            if not await self._ended(0):
                self._process.signal(signal.SIGKILL)
            if not await self._ended(KILL_S):
                raise PeerTimeout(self.name, "SIGKILL", KILL_S)
        return self._watching.result()

    async def _closes(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.proxy.close()  # type: ignore[attr-defined]
            return True
        except (PeerDied, TimeoutError):
            return False
        except Exception as error:  # the process ends all the same, but report the error
            reason, _, _ = str(error).partition("\n")
            self._stopping = f"was stopped; its close() failed: {reason}"
            return False

    async def _ended(self, seconds: float) -> bool:
        return bool((await asyncio.wait({self._watching}, timeout=seconds))[0])

    async def _watch(self) -> str:
        ended = await self._process.wait()  # bounded: by its heartbeat, and by `stop`
        if self._listening is not None:
            self._listening.cancel()
        how = self._stopping or f"{self._killed or f'died: {ended}'}; {self._log.tail()}"
        self._connection.died(how)
        await self._connection.close()
        return how

    async def _listen(self, liveness: Liveness) -> None:
        moved, since = -1.0, time.monotonic()
        while True:
            asked = time.monotonic()
            answer = asyncio.ensure_future(self._connection.ping(liveness.silent_s))
            try:
                if await stopped_instead(self.pid, answer):
                    self.kill(f"was stopped by a signal for {stopped.LOOK_S * stopped.LOOKS:g} s and was killed")
                    return
                self._beat = answer.result()
            except PeerTimeout:
                if time.monotonic() - asked > 1.5 * liveness.silent_s:
                    continue  # this process was itself stopped or starved: the answer may have arrived meanwhile
                self.kill(f"was silent for {liveness.silent_s:g} s ({_state(self.pid)}) and was killed")
                return
            except (PeerDied, RemoteError, ValueError):
                return  # it has ended; the watcher says how
            finally:
                answer.cancel()
            self._heard = now = time.monotonic()
            if self._beat.progress != moved or not self._beat.busy:
                moved, since = self._beat.progress, now
            elif now - since > liveness.stuck_s:
                method = self._beat.busy[0][0]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGUSR1)  # `role_host` made this write all stacks to the log
                await asyncio.sleep(_STACKS_S)  # bounded: once, then it is killed
                self.kill(f"made no progress for {liveness.stuck_s:g} s in {method}() and was killed")
                return
            await asyncio.sleep(liveness.every_s)  # bounded: a watch, cancelled by `stop`


class Local:
    """Placement that forks each role from one fork server on this machine; their logs are in `logs`."""

    def __init__(
        self,
        logs: Path,
        command: Sequence[str] | None = None,
        start_deadline: float = START_S,
        liveness: Liveness | None = None,
    ) -> None:
        """command: runs a module that calls `role_host.host`; None: `python -m tidemill.run.role_main`.

        start_deadline: limit of a start in seconds, that of the fork server included.
        """
        self._logs, self._command = logs, command or [sys.executable, "-m", MODULE]
        self._start_deadline, self._liveness = start_deadline, liveness
        self._servers: list[ForkServer] = []  # the newest last
        self._started: list[LocalProcess[Any]] = []
        self._closed = False

    def begin(self) -> None:
        self._server()

    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        resources: Resources = Resources(),
        deadlines: Mapping[str, float] | None = None,
    ) -> LocalProcess[T]:
        """Fork a child, have it build the role, and connect to it. Its output goes to `logs/name.log`.

        spec: plain data. Raises what building the object raised when that is of
        the ValueError family, else StartFailed; PeerTimeout, naming the peer, when the start takes longer than its deadline.
        The child is then gone.
        """
        if not name or "/" in name:
            raise ValueError(f"process name {name!r}: expected one that can name a file")
        check_deadlines(protocol, deadlines)
        server, begun = self._server(), asyncio.get_running_loop().time()
        log, token = Log.at(self._logs / f"{name}.log"), secrets.token_hex(32)
        reading, writing = os.pipe()
        try:
            launch = Launch(os.getpid(), token, role, name, spec)
            process = await server.fork(launch, writing, log.path, resources, self._start_deadline)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        limit = asyncio.timeout_at(begun + self._start_deadline)
        try:
            async with limit:
                ready = await _reported(reading, process, name, log)
                connection = Connection(protocol, ready.address, token, name, deadlines=deadlines)
                try:
                    await connection.hello(self._start_deadline)
                except BaseException:
                    await connection.close()
                    raise
                finally:
                    if ready.folder:  # nobody needs it any more
                        shutil.rmtree(ready.folder, ignore_errors=True)
        except BaseException as error:
            await _end(process, name)
            if isinstance(error, TimeoutError) and limit.expired():
                raise PeerTimeout(name, "start", self._start_deadline) from None
            raise
        handle = LocalProcess(connection, process, log, self._liveness)
        self._started = [*(each for each in self._started if each.alive), handle]
        return handle

    async def start_group(
        self,
        protocol: type[T],
        role: str,
        specs: Mapping[str, dict[str, Any]],
        resources: Sequence[Resources],
        deadlines: Mapping[str, float] | None = None,
    ) -> RoleGroup[T]:
        """Start the roles side by side. They meet at an anonymous file, which goes away with this process."""
        (meeting, let_go), each = _meeting(), list[asyncio.Task[LocalProcess[T]]]()
        try:
            async with asyncio.TaskGroup() as group:
                for (name, spec), own in zip(specs.items(), resources, strict=True):
                    spec = spec | {"rank": len(each), "meeting": meeting}
                    each.append(group.create_task(self.start(protocol, role, name, spec, own, deadlines)))
        except BaseException as failed:
            await asyncio.gather(*(task.result().stop() for task in each if _started(task)), return_exceptions=True)
            let_go()
            raise (failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed) from None
        return RoleGroup([task.result() for task in each], let_go)

    async def close(self) -> None:
        self._closed = True
        for server in self._servers:
            server.kill("was closed")
        await asyncio.gather(*(server.close() for server in self._servers))
        await asyncio.gather(*(handle.wait() for handle in self._started))  # bounded: their processes have ended

    def _server(self) -> ForkServer:
        """The running fork server; a new one when there is none."""
        assert not self._closed, "a placement that was closed starts nothing"
        if not self._servers or not self._servers[-1].usable:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._servers = [server for server in self._servers if not server.gone]
            self._servers.append(ForkServer(self._command, Log.at(self._logs / "forkserver.log")))
        return self._servers[-1]


def _meeting() -> tuple[str, Callable[[], None]]:
    """A new file at which processes can meet, and the function that removes it."""
    if (made := anonymous_memory("tidemill-meeting")) is not None:
        return made[1], lambda: os.close(made[0])
    folder = tempfile.mkdtemp(prefix="tidemill-")
    return f"{folder}/meeting", lambda: shutil.rmtree(folder, ignore_errors=True)


def _started(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _reported(fd: int, process: ForkedProcess, name: str, log: Log) -> Ready:
    """Read the child's report of its start. Raises the error that it reports, or StartFailed."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "rb", buffering=0)  # from here on asyncio's transport owns and closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    reading, ended = asyncio.create_task(_read(reader)), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by `start`
        await asyncio.wait({reading}, timeout=_PIPE_S if ended.done() else 0)
        if not reading.done() or reading.exception() is not None:
            raise StartFailed(f"{name} did not start: {await ended}; {log.tail()}")  # bounded: by `start`
    finally:
        reading.cancel()
        ended.cancel()
        transport.close()
    report = serialization.decode(reading.result(), Report)
    if isinstance(report, Ready):
        return report
    error = rebuild(msgspec.structs.replace(report, message=f"{name} did not start: {report.message}"), name)
    if isinstance(error, RemoteError):
        failed = StartFailed(f"{name} did not start: {error.kind}: {report.message} (traceback in {log.path})")
        failed.add_note(report.trace)
        raise failed
    raise error


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(REPORT_LENGTH), "big")  # bounded: by `start`
    if length > _MOST_REPORT:
        raise CodecError(f"a report of {length} bytes, at most {_MOST_REPORT} are taken")
    return await reader.readexactly(length)  # bounded: by `start`


async def _end(process: ForkedProcess, name: str) -> None:
    process.signal(signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_S):
            await process.wait()
    except TimeoutError:
        raise PeerTimeout(name, "SIGKILL", KILL_S) from None


def _state(pid: int) -> str:
    """The system's word for the state of a process that does not answer."""
    try:
        return f"its state is {psutil.Process(pid).status()!r}"
    except psutil.NoSuchProcess:
        return "it is gone"
