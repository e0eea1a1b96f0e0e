"""Parent's side of one worker process: start it, exchange frames, kill it, say why it ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psutil

from tidemill.runtime.started_process import started_process
from tidemill.runtime.workers import guard, keeper
from tidemill.runtime.workers.frames import HEADER_BYTES, framed, size_of

STARTUP_LIMIT_S = 120.0  # limit for starting Python and importing what the user's code imports
REAP_LIMIT_S = 5.0  # limit for a killed process to be gone
MOST_OUTPUT = 64 << 20  # bytes that a worker may print from one frame to the next
_LAST_WORDS_S = 0.2  # limit for reading the pipe of a dead process to its end
_STACKS_S = 2.0  # limit for a process, perhaps a starved one, to write its stack
_TAIL = 16384  # bytes of a worker's output that are kept to explain a failure
_TRACED = "(most recent call first):\n"  # as faulthandler writes it
_FRAME = re.compile(r'  File "(.*?)", line (\d+) in (\S+)\n')
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

MARK_NAME = "TIDEMILL_WORKER"
MARK = f"{MARK_NAME}={secrets.token_hex(8)}."  # begins the mark of each of this process's workers, see `guard`
_numbers = itertools.count()


async def closed(stdin: asyncio.StreamWriter) -> None:
    """Wait until a stdin that was closed is really closed, and drop the error for bytes that nobody read.

    Otherwise asyncio would report it when the pipe is garbage collected, in the middle of unrelated work.
    """
    with suppress(OSError):
        await asyncio.wait_for(asyncio.shield(stdin.wait_closed()), REAP_LIMIT_S)


class WorkerProcess:
    """A running worker: `await start(...)`, `post(...)`, `receive(...)`; `kill()`, `await reap()`."""

    def __init__(self, process: asyncio.subprocess.Process, title: str, mark: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.pid, self.title, self._mark = process.pid, title, mark  # pid: the worker's own, once it has reported it
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._output, self._printed = bytearray(), 0
        self._draining = asyncio.ensure_future(self._drain(process.stderr))

    @classmethod
    async def start(cls, module: str, title: str, memory_mb: int) -> Self:
        """Run MODULE as a worker below its keepers. title: the worker's name in messages."""
        # A fixed hash seed: the order of a set in a user's code must not differ from run to run. A user's threads that have
        # nothing to do must not spin on cores where trainer and engines compute.
        mark = f"{MARK}{next(_numbers)}."
        process = await started_process(
            *(sys.executable, "-m", keeper.__name__, module, str(memory_mb), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONHASHSEED": "0", MARK_NAME: mark.partition("=")[2]},
        )
        child = cls(process, title, mark)
        try:
            await child._introduced()
        except BaseException:
            child.kill()
            await child.reap()
            raise
        return child

    async def _introduced(self) -> None:
        """Read the worker's process id. A worker that ended before it sent one is noticed at the first call."""
        with suppress(asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(STARTUP_LIMIT_S):
                (self.pid,) = keeper.PID.unpack(await self._stdout.readexactly(keeper.PID.size))

    def post(self, body: bytes) -> None:
        """Send one frame without waiting for the worker to read it. A frame to a dead worker is lost."""
        self._printed = 0
        self._stdin.write(framed(body))

    async def receive(self, most: int) -> bytes:
        """The next frame. Raises CodecError when it is longer than `most` bytes, IncompleteReadError when none comes."""
        header = await self._stdout.readexactly(HEADER_BYTES)  # bounded: by the caller, and by the worker's death
        return await self._stdout.readexactly(size_of(header, most))  # bounded: as above

    def kill(self) -> None:
        """Kill the worker and its process group. Its keepers, if there are any, kill what else it started."""
        alive = self._process.returncode is None
        if alive and not keeper.KEEPERS:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.pid).children(recursive=True):
                    _signal(os.kill, child.pid)
        if alive:
            _signal(os.kill, self.pid)
        if alive or not keeper.KEEPERS:
            _signal(os.killpg, self.pid)

    async def reap(self) -> None:
        """Wait until the killed process and all that it started are gone, and its pipes are closed."""
        self._stdin.close()
        if await self._exited() is None:  # its keepers are stopped (SIGSTOP)
            self._process.kill()
            await self._exited()
        deadline = time.monotonic() + REAP_LIMIT_S
        while guard.strike(self._mark.encode(), keepers=time.monotonic() > deadline - REAP_LIMIT_S / 2):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.01)
        self._draining.cancel()
        await asyncio.wait([self._draining], timeout=REAP_LIMIT_S)
        # asyncio closes the pipes when it has read them to their end, which may be after the last turn of its loop.
        self._process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
        await closed(self._stdin)

    async def epitaph(self) -> str:
        """Describe how the worker ended, with the last line of its output."""
        code = await self._exited()
        if code is None:
            return f"{self.title} closed its pipe"
        await asyncio.wait([self._draining], timeout=_LAST_WORDS_S)  # runs out only when others hold the pipe open
        if self._printed > MOST_OUTPUT:
            return f"{self.title} printed more than {MOST_OUTPUT >> 20} MiB in one call and was killed"
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        last = self.last_words()
        return f"{self.title} {how}" + (f"; its last words: {last}" if last else "")

    def last_words(self) -> str:
        """The last line of the worker's output, or its place in the code if a stack was written."""
        output = bytes(self._output).decode(errors="replace")
        _, traced, frames = output.rpartition(_TRACED)
        if traced and (calls := _FRAME.findall(frames)):  # innermost first; the user's own code if there is any
            file, line, function = next((c for c in calls if not c[0].startswith(_LIBRARIES)), calls[0])
            return f"in {function}, {file}:{line}"
        return output.strip().rsplit("\n", 1)[-1][-300:]

    async def where(self) -> str:
        """The line a worker is at now, if it registered `faulthandler` for SIGUSR1; else perhaps empty."""
        if self._process.returncode is not None:
            return "it is gone"
        if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
            return "it is stopped"
        self._output.clear()
        deadline, printed = time.monotonic() + _STACKS_S, -1
        os.kill(self.pid, signal.SIGUSR1)
        while time.monotonic() < deadline and (_TRACED.encode() not in self._output or self._printed > printed):
            printed = self._printed
            await asyncio.sleep(0.02)
        return self.last_words()

    async def _exited(self) -> int | None:
        """Its exit status, or None when it does not end within REAP_LIMIT_S."""
        # `Process.wait` would also wait for every other process that holds its stderr.
        deadline = time.monotonic() + REAP_LIMIT_S
        while self._process.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.returncode

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        # bounded: `reap` cancels it
        while chunk := await stderr.read(1 << 16):
            self._output = (self._output + chunk)[-_TAIL:]
            self._printed += len(chunk)
            if self._printed > MOST_OUTPUT:  # reading on would only keep this process busy
                self.kill()
                return


def _signal(send: Callable[[int, int], None], target: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone; macOS raises EPERM for a group of zombies
        send(target, signal.SIGKILL)
