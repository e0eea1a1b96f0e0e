"""An inference server as a process: started, watched, and ended with everything that it has started.

    role process -> two keepers -> the server, in its own environment -> its workers

The keepers (`runtime.workers.keeper`) kill everything below them when the server or the role that started it ends, also
when that is killed. The server's output goes to a log file, whose last lines an error names. Files that a killed server
leaves are removed (`left_behind`).
"""

from __future__ import annotations

import asyncio
import getpass
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tidemill.core.errors import EngineFailed, StartFailed
from tidemill.engine.remote.left_behind import LeftBehind
from tidemill.runtime.process_logs import Log, describe
from tidemill.runtime.workers import keeper, kept_command
from tidemill.runtime.workers.stopped import LOOK_S, LOOKS, stopped_at

RARELY_S = 2.0  # between two looks for stopped processes, which read the whole process table
HEALTH_S = 0.25  # between two questions after its health
ANSWER_S = 10.0  # limit of one of them
POLITE_S = 2.0  # for a server to end by itself: it removes files and shared memory then
KILL_S = 5.0  # for a killed one to be gone
REPORT_S = 30.0  # for its keepers to report its process id
# Compiled code stays where it is without a folder for temporary files of the server's own.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")}


class ServerProcess:
    """A running server. `ended` is its last words once it has ended, and "" before."""

    def __init__(self, command: Sequence[str], *, name: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start the command, in a running event loop. name: names it in errors. env: added to the environment."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self.ended = name, log, ""
        self._log, self._begun, self._left, self._settled = Log.at(log), time.monotonic(), LeftBehind(log), False
        reading, writing = os.pipe()
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", kept_command.__name__, str(os.getpid()), str(writing), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # no Ctrl-C from the terminal
                    env={**CACHES, **os.environ, **(env or {}), "TMPDIR": self._left.folder},
                    pass_fds=(writing,),
                )
        finally:
            os.close(writing)
        self.folder = self._left.folder  # for temporary files; it goes with the server
        self._report, self._pid = reading, 0
        self._note()
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {name}")

    async def healthy(self, check: Callable[[], Awaitable[object]], deadline_s: float) -> None:
        """Wait until `check` raises nothing. Raises StartFailed with the server's last words if it ends or is too late."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await check()
                self._note()
                self._settled = True
                return
            except (EngineFailed, TimeoutError, ValueError) as error:
                why = str(error) or "it did not answer"
            if self.ended:
                raise StartFailed(f"{self.name} did not start: {self.ended}")
            if time.monotonic() - self._begun > deadline_s:
                raise StartFailed(f"{self.name} was not ready within {deadline_s:g} s: {why}; {self._log.tail()}")
            await asyncio.sleep(HEALTH_S)  # bounded: by the deadline above

    async def close(self) -> None:
        """End the server and everything that it has started. Closing twice is fine."""
        if self._process.poll() is None and (pid := self._server()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            await self._gone(POLITE_S)
        self.kill()
        if not await self._gone(KILL_S):  # its keepers are stopped
            self._strike()
            await self._gone(KILL_S)
        self._left.remove()
        self._watching.cancel()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def kill(self) -> None:
        """End it now, without waiting for it."""
        if self._process.poll() is not None:
            return
        if keeper.KEEPERS:  # told to, they kill everything below them
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
        else:
            self._strike()

    def _strike(self) -> None:
        """Kill the whole tree from here."""
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid)
            for each in (*tree.children(recursive=True), tree):
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    def _server(self) -> int:
        """The server's process id; 0 if it was never reported."""
        if not self._pid and self._report >= 0 and select.select([self._report], [], [], REPORT_S)[0]:
            raw = os.read(self._report, keeper.PID.size)  # bounded: by `select`
            self._pid = keeper.PID.unpack(raw)[0] if len(raw) == keeper.PID.size else 0
        return self._pid

    async def _gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self._process.poll() is not None

    async def _watch(self) -> None:
        looks, seen, looked = 0, None, 0.0
        while (code := self._process.poll()) is None:
            await asyncio.sleep(LOOK_S)  # bounded: a watch, which `close` ends
            if not looks and time.monotonic() - looked < RARELY_S:
                continue
            looked = time.monotonic()
            if not self._settled:
                self._note()
            before, seen = seen, self._stopped()
            looks = looks + 1 if seen is not None and seen == before else 0
            if looks == LOOKS:
                self.ended = f"{self.name} was stopped by a signal and was killed"
                self._strike()
                return
        self._left.remove()
        self.ended = f"{self.name} ended: {describe(code)}; {self._log.tail()}"

    def _note(self) -> None:
        """Note what the server would leave if it were killed now."""
        with suppress(psutil.Error):
            tree = psutil.Process(self._process.pid)
            self._left.note([tree, *tree.children(recursive=True)])

    def _stopped(self) -> tuple[object, ...] | None:
        """The state of the first process of the server that is stopped, equal while it stays so; None: none is."""
        with suppress(psutil.Error):
            for each in psutil.Process(self._process.pid).children(recursive=True):
                if (seen := stopped_at(each.pid)) is not None:
                    return each.pid, *seen
        return None


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
