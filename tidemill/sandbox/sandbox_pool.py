"""Sandbox: runs programs isolated and within limits, so many at a time, in sandboxes that are started ahead."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self

from tidemill.core.episode_counts import counted
from tidemill.core.errors import ConfigError, SandboxFailed
from tidemill.sandbox.execution import Execution, SandboxedProgram
from tidemill.sandbox.sandbox_settings import LEVELS, Level, SandboxSettings
from tidemill.sandbox.supervisor_process import SupervisorProcess

NOTHING = SandboxedProgram("0")
INSTALL = "pip install 'tidemill[sandbox]', or install bubblewrap by the system's packages"


class Sandbox:
    """Runs programs in sandboxes: `async with Sandbox(settings) as sandbox: await sandbox.run(program)`."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self.level = ""  # known once it is entered
        self._room = asyncio.Semaphore(self.settings.at_once)  # bounded: each program ends at its limits
        self._ready = deque[SupervisorProcess]()
        self._starting = set[asyncio.Task[None]]()
        self._closed = False

    async def __aenter__(self) -> Self:
        """Find the strongest level that works. Raises ConfigError when none does.

        A level that was named is not tried before the first program, unless sandboxes are to be started ahead.
        """
        if self.settings.level != "auto" and not self.settings.warm:
            self.level = self.settings.level
            return self
        levels = LEVELS if self.settings.level == "auto" else (self.settings.level,)
        against = list[str]()
        for level in levels:
            try:
                await self._tried(level)
                self.level = level
                return self
            except (ConfigError, SandboxFailed) as error:
                against.append(str(error))
        raise ConfigError(
            f"no sandbox works here ({'; '.join(against)}): {INSTALL}; or set the level 'limits', which has limits and "
            "isolates nothing"
        )

    async def _tried(self, level: Level) -> None:
        """Start the first sandbox of a level, and have it confine a program. Raises ConfigError or SandboxFailed."""
        supervisor = await SupervisorProcess.start(level, self.settings)
        try:
            if level != "limits":
                await supervisor.run(NOTHING, b"")
        except BaseException:
            await supervisor.close()
            raise
        if supervisor.reusable:
            self._ready.append(supervisor)
        else:
            await supervisor.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._ready))
        self._ready.clear()

    @property
    def processes(self) -> set[int]:
        """Process ids of the sandboxes that wait for a program."""
        return {each.pid for each in self._ready}

    async def run(self, program: SandboxedProgram, stdin: bytes = b"") -> Execution:
        """Run a program once. Raises SandboxFailed when the sandbox itself fails, never for what the program does."""
        with _counting():
            async with self._room, self._taken() as supervisor:
                return _seen(await supervisor.run(program, stdin))

    async def run_pair(self, first: SandboxedProgram, second: SandboxedProgram, stdin: bytes = b"") -> Execution:
        """Run two programs in a sandbox each, connected by their descriptor 3, until the first one ends.

        stdin: of the first one; the other has none.
        """
        with _counting():
            async with self._room:
                ends = socket.socketpair()
                started = list[SupervisorProcess]()
                try:
                    for end in ends:
                        started.append(await SupervisorProcess.start(self.level, self.settings, end.fileno()))
                        end.close()
                    other = asyncio.create_task(started[1].run(second, b""))
                    try:
                        return _seen(await started[0].run(first, stdin))
                    finally:
                        other.cancel()
                        await asyncio.gather(other, return_exceptions=True)
                finally:
                    for end in ends:
                        end.close()
                    await asyncio.gather(*(each.close() for each in started))

    @asynccontextmanager
    async def _taken(self) -> AsyncIterator[SupervisorProcess]:
        """A supervisor that nobody else uses; it is ended, or kept for the next program."""
        if self._closed or not self.level:
            raise SandboxFailed("the sandbox is not open")
        supervisor = self._ready.popleft() if self._ready else await SupervisorProcess.start(self.level, self.settings)
        self._start_ahead()
        try:
            yield supervisor
        finally:
            if supervisor.reusable and not self._closed and len(self._ready) < self.settings.at_once:
                self._ready.append(supervisor)
            else:
                await supervisor.close()

    def _start_ahead(self) -> None:
        """Start sandboxes for the next programs, while this one runs."""
        lacking = self.settings.warm - len(self._ready) - len(self._starting)
        for _ in range(lacking):
            task = asyncio.create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        try:
            self._ready.append(await SupervisorProcess.start(self.level, self.settings))
        except (ConfigError, SandboxFailed):
            return  # whoever needs one starts it, and hears why it does not start


@contextmanager
def _counting() -> Iterator[None]:
    """Count a run in the episode's counts, and a fault of the sandbox."""
    counted("sandbox/runs")
    try:
        yield
    except SandboxFailed:
        counted("sandbox/failed")
        raise


def _seen(done: Execution) -> Execution:
    """The execution, counted if a limit ended it."""
    if done.limit:
        counted("sandbox/limits")
    return done
