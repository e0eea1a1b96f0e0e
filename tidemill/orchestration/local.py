"""Roles as processes of this machine: started, watched, and always reaped.

    spawn -> child reads its launch from stdin, builds, reports on a pipe -> connect -> proxy
    watcher: the process ended -> every pending call fails with PeerDied, naming the signal and the end of the log
    heartbeats: silent, or without progress in a call -> killed, so that dead is all that a process can be
    stop:    close() -> SIGTERM -> SIGKILL

A child is the leader of its own session, so that Ctrl-C reaches the controller alone. It dies with the thread that spawned
it: spawn from a thread that lives as long as the run. Once connected, the socket's folder is removed, so nothing is left
behind however the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import psutil

from tidemill import codec
from tidemill.orchestration.hosting import REPORT_LENGTH, Launch, Ready, Report
from tidemill.orchestration.placement import Liveness, StartFailed, Vitals
from tidemill.orchestration.rpc import DEADLINE_S, Connection, check_deadlines, connect
from tidemill.orchestration.wire import Beat, PeerDied, PeerTimeout, RemoteError, methods_of, rebuild

T = TypeVar("T")
MODULE = "tidemill.remote_worker"
START_S = 120.0  # a cold import of torch from a network disk takes its time
_KILL_S = 10.0  # for the kernel to end a process that was sent SIGKILL
_PIPE_S = 1.0  # to read what a process wrote before it ended
_STACKS_S = 0.5  # to write the stacks of all threads
_MOST_REPORT = 1 << 20  # bytes
_TAIL_BYTES = 4096
_TAIL_LINES = 15
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Log:
    path: Path
    since: int  # bytes that earlier processes of this name wrote

    @classmethod
    def at(cls, path: Path) -> Log:
        return cls(path, path.stat().st_size if path.exists() else 0)

    def tail(self) -> str:
        """Where it is, and its last lines, indented; at most `_TAIL_BYTES` are read."""
        with open(self.path, "rb") as file:
            file.seek(max(self.since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
        if not lines:
            return f"its log: {self.path} (empty)"
        return "\n".join([f"its log: {self.path}", *(f"  | {line}" for line in lines)])


class LocalProcess(Generic[T]):
    """A running child. Made by `spawn`."""

    def __init__(
        self,
        connection: Connection[T],
        process: asyncio.subprocess.Process,
        log: Log,
        closable: bool,
        liveness: Liveness | None,
    ) -> None:
        self.name, self.pid, self._log = connection.name, process.pid, log
        self._connection, self._process, self._closable = connection, process, closable
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
        return self._process.returncode is None

    async def wait(self) -> str:
        return await asyncio.shield(self._watching)  # bounded: until `stop`, for those who want to know

    def vitals(self) -> Vitals:
        return Vitals(self.name, self.pid, self.alive, time.monotonic() - self._heard, self._beat.progress, self._beat.busy)

    def kill(self, why: str) -> None:
        self._killed = self._killed or why
        self._signal(signal.SIGKILL)

    async def stop(self, deadline: float = 10.0) -> str:
        """Half of `deadline` (seconds) is for the object's close(), a quarter for leaving after SIGTERM; then SIGKILL."""
        self._stopping = self._stopping or "was stopped"
        try:
            if self._closable and self.alive and await self._closes(deadline / 2):
                await self._ended(deadline / 4)
            self._signal(signal.SIGTERM)  # to nobody, if it has left by now
            if not await self._ended(deadline / 4):
                self._stopping += f"; it did not end within {deadline:g} s and was killed"
                self._signal(signal.SIGKILL)
        finally:  # also when we are cancelled: nothing of ours keeps running
            if self._listening is not None:
                self._listening.cancel()
            if not await self._ended(0):
                self._signal(signal.SIGKILL)
            if not await self._ended(_KILL_S):
                raise PeerTimeout(self.name, "SIGKILL", _KILL_S)
            await self._connection.close()
        return self._watching.result()

    async def _closes(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.proxy.close()  # type: ignore[attr-defined]
            return True
        except (PeerDied, TimeoutError):
            return False
        except Exception as error:  # whatever it was, it goes down all the same, but say so
            reason, _, _ = str(error).partition("\n")
            self._stopping = f"was stopped; its close() failed: {reason}"
            return False

    async def _ended(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self._watching}, timeout=seconds)
        return bool(done)

    def _signal(self, number: int) -> None:
        _signal_group(self._process, number)

    async def _watch(self) -> str:
        code = await self._process.wait()  # bounded: by its heartbeat, and by `stop`
        if self._listening is not None:
            self._listening.cancel()
        how = self._stopping or f"{self._killed or f'died: {_describe(code)}'}; {self._log.tail()}"
        self._connection.died(how)
        return how

    async def _listen(self, liveness: Liveness) -> None:
        """Heartbeats, until one is missing, or until they tell of no progress for too long."""
        moved, since = -1.0, time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                self._beat = await self._connection.ping(liveness.silent_s)
            except PeerTimeout:
                if time.monotonic() - asked > 1.5 * liveness.silent_s:
                    continue  # it is we who were stopped, or starved: the answer may be lying here
                self.kill(f"was silent for {liveness.silent_s:g} s ({_state(self.pid)}) and was killed")
                return
            except (PeerDied, RemoteError, ValueError):
                return  # it has ended; the watcher says how
            self._heard = now = time.monotonic()
            if self._beat.progress != moved or not self._beat.busy:
                moved, since = self._beat.progress, now
            elif now - since > liveness.stuck_s:
                method = self._beat.busy[0][0]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGUSR1)  # `hosting` has it write all its stacks to the log
                await asyncio.sleep(_STACKS_S)  # bounded: once, then it is killed
                self.kill(f"made no progress for {liveness.stuck_s:g} s in {method}() and was killed")
                return
            await asyncio.sleep(liveness.every_s)  # bounded: a watch, cancelled by `stop`


async def spawn(
    protocol: type[T],
    role: str,
    name: str,
    spec: dict[str, Any],
    logs: Path,
    module: str = MODULE,
    command: Sequence[str] | None = None,
    threads: int | None = None,
    deadline: float = DEADLINE_S,
    deadlines: Mapping[str, float] | None = None,
    start_deadline: float = START_S,
    liveness: Liveness | None = None,
) -> LocalProcess[T]:
    """Start `python -m module` (or `command`), which calls `hosting.host`, and wait until it serves `protocol`.

    `spec` is plain JSON data. `threads` bounds the child's numerical libraries. What it prints goes to `logs/name.log`.
    Deadlines are in seconds. Raises what building the object raised when that is of the ValueError family, else
    StartFailed; PeerTimeout when it takes longer than `start_deadline`. The child is then gone.
    """
    if not name or "/" in name:
        raise ValueError(f"process name {name!r}: expected one that can name a file")
    check_deadlines(protocol, deadlines)
    logs.mkdir(parents=True, exist_ok=True)
    log, token = Log.at(logs / f"{name}.log"), secrets.token_hex(32)
    reading, writing = os.pipe()
    try:
        launch = Launch(os.getpid(), writing, token, role, name, spec)
        process = await _start(command or [sys.executable, "-m", module], launch, log.path, threads)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    limit = asyncio.timeout(start_deadline)
    try:
        async with limit:
            ready = await _reported(reading, process, name, log)
            connection = connect(protocol, ready.address, token, name, deadline, deadlines)
            await _greet(connection, ready.folder, start_deadline)
    except BaseException as error:
        await _end(process)
        if isinstance(error, TimeoutError) and limit.expired():
            raise PeerTimeout(name, "start", start_deadline) from None
        raise
    return LocalProcess(connection, process, log, "close" in methods_of(protocol), liveness)


class Local:
    """Each role a process of this machine, its log in `logs`."""

    def __init__(
        self,
        logs: Path,
        command: Sequence[str] | None = None,
        deadline: float = DEADLINE_S,
        start_deadline: float = START_S,
        liveness: Liveness | None = None,
    ) -> None:
        self._logs, self._command, self._deadline, self._start_deadline = logs, command, deadline, start_deadline
        self._liveness = liveness

    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        threads: int | None = None,
        deadlines: Mapping[str, float] | None = None,
    ) -> LocalProcess[T]:
        return await spawn(
            protocol,
            role,
            name,
            spec,
            self._logs,
            command=self._command,
            threads=threads,
            deadline=self._deadline,
            deadlines=deadlines,
            start_deadline=self._start_deadline,
            liveness=self._liveness,
        )


async def _start(command: Sequence[str], launch: Launch, log: Path, threads: int | None) -> asyncio.subprocess.Process:
    # Passive: threads that wait for one another sleep. Spinning, two of them are five times slower on a core that is shared.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | ({key: str(threads) for key in _THREADS} if threads else {})
    with open(log, "ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(launch.report,),
            start_new_session=True,
            env=environment,
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(launch))
    process.stdin.close()  # flushes first; a child that is gone already is noticed by its report
    return process


async def _reported(fd: int, process: asyncio.subprocess.Process, name: str, log: Log) -> Ready:
    """What the child says of its start."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "rb", buffering=0)  # the transport's from here on
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    reading, ended = asyncio.create_task(_read(reader)), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by `spawn`
        await asyncio.wait({reading}, timeout=_PIPE_S if ended.done() else 0)
        if not reading.done() or reading.exception() is not None:
            raise StartFailed(f"{name} did not start: {_describe(await ended)}; {log.tail()}")  # bounded: by `spawn`
    finally:
        reading.cancel()
        ended.cancel()
        transport.close()
    report = codec.decode(reading.result(), Report)
    if isinstance(report, Ready):
        return report
    error = rebuild(msgspec.structs.replace(report, message=f"{name} did not start: {report.message}"), name)
    if isinstance(error, RemoteError):
        failed = StartFailed(f"{name} did not start: {error.kind}: {report.message} (traceback in {log.path})")
        failed.add_note(report.trace)
        raise failed
    raise error


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(REPORT_LENGTH), "big")  # bounded: by `spawn`
    if length > _MOST_REPORT:
        raise codec.CodecError(f"a report of {length} bytes, at most {_MOST_REPORT} are taken")
    return await reader.readexactly(length)  # bounded: by `spawn`


async def _greet(connection: Connection[Any], folder: str, seconds: float) -> None:
    """Once the peer has answered, its socket needs no name any more."""
    try:
        await connection.hello(seconds)
    except BaseException:
        await connection.close()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _signal_group(process, signal.SIGKILL)
    async with asyncio.timeout(_KILL_S):
        await process.wait()


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    """To the child and whatever it started in its session. Only while it is not reaped, for then its id is its own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _state(pid: int) -> str:
    """What the system says of a process that does not answer."""
    try:
        return f"its state is {psutil.Process(pid).status()!r}"
    except psutil.NoSuchProcess:
        return "it is gone"


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
