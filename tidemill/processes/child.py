"""One worker process, seen from the process that started it: start, frames, kill with everything it started, last words."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Self

import psutil

from tidemill.processes.frames import HEADER_BYTES, framed, size_of

STARTUP_LIMIT_S = 120.0  # to start Python and to import what the user's code imports
REAP_LIMIT_S = 5.0  # for a killed process to be gone
_LAST_WORDS_S = 0.2  # for the pipe of a process that is gone to be read to its end
_TAIL = 4096  # bytes of a worker's output that are kept, for the reason of a failure
_TRACED = re.compile(r'most recent call first\):\s+File "(.*?)", line (\d+) in (\S+)')  # as faulthandler writes it


class Child:
    """Use as: `await start(...)`, `await send(...)` and `await receive(...)`, `kill()`, `await reap()`."""

    def __init__(self, process: asyncio.subprocess.Process, title: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.pid, self.title = process.pid, title
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._output = bytearray()
        self._draining = asyncio.ensure_future(self._drain(process.stderr))

    @classmethod
    async def start(cls, module: str, title: str, memory_mb: int) -> Self:
        """Run `python -m MODULE MEMORY_MB PARENT`. title: what messages call it."""
        # A fixed hash seed: what a user's code makes of a set must not differ from run to run.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(memory_mb), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a process group of its own, and no Ctrl-C from the terminal
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        return cls(process, title)

    def post(self, body: bytes) -> None:
        """Send one frame without waiting for the worker to read it. To a worker that is gone it goes nowhere."""
        self._stdin.write(framed(body))

    async def send(self, body: bytes) -> None:
        self.post(body)
        await self._stdin.drain()  # bounded: by the caller, and by the worker's death

    async def receive(self, most: int) -> bytes:
        """The next frame. Raises CodecError when it is longer than `most` bytes, IncompleteReadError when none comes."""
        # bounded: by the caller, and by the worker's death
        header = await self._stdout.readexactly(HEADER_BYTES)
        # bounded: as above
        return await self._stdout.readexactly(size_of(header, most))

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

    async def epitaph(self) -> str:
        """How it ended, and the last of what it said."""
        code = await self._exited()
        if code is None:
            return f"{self.title} closed its pipe"
        await asyncio.wait([self._draining], timeout=_LAST_WORDS_S)  # longer only while others hold the pipe
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        last = self.last_words()
        return f"{self.title} {how}" + (f"; its last words: {last}" if last else "")

    def last_words(self) -> str:
        """The last line of its output; where it was, when a crash or `faulthandler` wrote that down."""
        output = bytes(self._output).decode(errors="replace").strip()
        if traced := _TRACED.findall(output):
            file, line, function = traced[-1]
            return f"in {function}, {file}:{line}"
        return output.rsplit("\n", 1)[-1][-300:]

    async def _exited(self) -> int | None:
        """Its exit status, or None when it does not end. `Process.wait` would also wait for every holder of its stderr."""
        deadline = time.monotonic() + REAP_LIMIT_S
        while self._process.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self._process.returncode

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        # bounded: `reap` cancels it
        while chunk := await stderr.read(1 << 16):
            self._output = (self._output + chunk)[-_TAIL:]


def _signal(send: Callable[[int, int], None], target: int) -> None:
    try:
        send(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone; macOS says EPERM of a group of zombies
        return
