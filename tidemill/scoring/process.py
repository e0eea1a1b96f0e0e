"""One worker process, seen from the pool: start, one exchange at a time, kill with everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import psutil

from tidemill import codec
from tidemill.scoring.frames import HEADER, MAX_REPLY, Done, Reply, Request, Started

STARTUP_LIMIT_S = 120.0  # to start Python and to import what the function imports
REAP_LIMIT_S = 5.0  # for a killed process to be gone
_TAIL = 4096  # bytes of a worker's output that are kept, for the reason of a failure


class WorkerFailed(Exception):
    """The worker can not be used again. `kind` is "timeout", "died" or "protocol"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class WorkerProcess:
    """Use as: `await start(...)`, `await exchange(...)` any number of times, `kill()`, `await reap()`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.pid = process.pid
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._output = bytearray()
        self._draining = asyncio.ensure_future(self._drain(process.stderr))

    @classmethod
    async def start(cls, memory_mb: int) -> WorkerProcess:
        # A fixed hash seed: what a verifier or a task generator makes of a set must not differ from run to run.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidemill.scoring.worker", str(memory_mb), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a process group of its own, and no Ctrl-C from the terminal
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        return cls(process)

    async def exchange(self, request: Request, limit_s: float) -> Done:
        """Have the request done. `limit_s` runs from the moment the worker begins. Raises WorkerFailed."""
        started = await self._within(self._begin(request), STARTUP_LIMIT_S, "did not start")
        if not isinstance(started, Started) or started.id != request.id:
            raise WorkerFailed("protocol", f"the scoring worker of {request.name} answered out of turn")
        done = await self._within(self._receive(), limit_s, f"{request.name} did not return")
        if not isinstance(done, Done) or done.id != request.id or len(done.outcomes) != max(1, request.count):
            raise WorkerFailed("protocol", f"the scoring worker of {request.name} answered out of turn")
        return done

    def kill(self) -> None:
        """Kill the worker, its process group, and children that left the group."""
        if self._process.returncode is None:
            try:
                children = psutil.Process(self.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                children = []
            for child in children:
                _signal(os.kill, child.pid)
        _signal(os.killpg, self.pid)

    async def reap(self) -> None:
        """Wait until the killed process is gone and its pipes are closed."""
        self._stdin.close()
        await self._exited()
        self._draining.cancel()
        await asyncio.wait([self._draining], timeout=REAP_LIMIT_S)

    async def _begin(self, request: Request) -> Reply:
        body = codec.encode(request)
        self._stdin.write(HEADER.pack(len(body)) + body)
        await self._stdin.drain()
        return await self._receive()

    async def _receive(self) -> Reply:
        size = HEADER.unpack(await self._stdout.readexactly(HEADER.size))[0]
        if size > MAX_REPLY:
            raise codec.CodecError(f"a reply of {size} bytes, at most {MAX_REPLY} are taken")
        return codec.decode(await self._stdout.readexactly(size), Reply)

    async def _within(self, work: Awaitable[Reply], limit_s: float, what: str) -> Reply:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise WorkerFailed("timeout", f"{what} within {limit_s:g} s and was killed") from None
        except codec.CodecError as error:
            raise WorkerFailed("protocol", f"the scoring worker wrote something else than a reply: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerFailed("died", await self._epitaph()) from None

    async def _epitaph(self) -> str:
        code = await self._exited()
        if code is None:
            return "the scoring worker closed its pipe"
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        last = bytes(self._output).decode(errors="replace").strip().rsplit("\n", 1)[-1]
        return f"the scoring worker {how}" + (f"; its last words: {last[-300:]}" if last else "")

    async def _exited(self) -> int | None:
        """Its exit status, or None when it does not end. `Process.wait` would also wait for every holder of its stderr."""
        deadline = time.monotonic() + REAP_LIMIT_S
        while self._process.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.returncode

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(1 << 16):
            self._output = (self._output + chunk)[-_TAIL:]


def _signal(send: Callable[[int, int], None], target: int) -> None:
    try:
        send(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone; macOS says EPERM of a group of zombies
        return
