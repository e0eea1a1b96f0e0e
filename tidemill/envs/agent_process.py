"""A user's program as a process: the lines that it prints, within limits, and its end with all that it has started.

    this process -> two keepers -> the program -> whatever it starts

When the program or this process ends, the keepers (`runtime.workers.keeper`) kill all that it has left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

from tidemill.core.bounded_await import undivided
from tidemill.core.outcomes import clip
from tidemill.runtime.process_logs import describe
from tidemill.runtime.workers import kept_command

MOST_LINE = 1 << 20  # bytes of one line that it prints
MOST_OUTPUT = 64 << 20  # bytes that a program of one episode may print
TAIL = 4096  # bytes of its errors that are kept
CLOSE_S = 5.0  # for killed processes to be gone


class AgentProcess(asyncio.SubprocessProtocol):
    """A running program: `await start(...)`, `tell(...)`, `await ended_within(...)`; `await close()`."""

    _transport: asyncio.SubprocessTransport

    def __init__(self, hear: Callable[[bytes], None], most: int | None) -> None:
        self._hear, self._most, self._printed = hear, most, 0
        self._begun, self._errors, self._flood = b"", b"", ""  # the line that is not complete; the tail of its errors
        self.complained = 0  # bytes of errors that it has printed
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when it has ended
        self._report = -1

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        variables: Mapping[str, str],
        hear: Callable[[bytes], None],
        most: int | None = MOST_OUTPUT,
    ) -> Self:
        """Start a command in the folder of this process. variables: added to its environment.

        hear: is called with each line that it prints. most: bytes that it may print; None: any number.
        """
        reading, writing = os.pipe()
        try:
            starting = asyncio.get_running_loop().subprocess_exec(
                lambda: cls(hear, most),
                *(sys.executable, "-m", kept_command.__name__, str(os.getpid()), str(writing), *command),
                start_new_session=True,  # a process group of its own, and no Ctrl-C from the terminal
                env={**os.environ, **variables},
                pass_fds=(writing,),
            )
            _, process = await undivided(starting, _closed)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        process._report = reading  # where the keepers report its process id, which nobody needs
        return process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Its process has ended, and all that it printed was heard."""
        if self._begun:
            self._hear(self._begun)
        if not self._over.done():
            self._over.set_result(None)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._errors, self.complained = (self._errors + data)[-TAIL:], self.complained + len(data)
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._printed += len(data)
        for line in lines:
            self._hear(line)
        if len(self._begun) > MOST_LINE:
            self._stop(f"printed more than {MOST_LINE >> 20} MiB in one line")
        if self._most is not None and self._printed > self._most:
            self._stop(f"printed more than {self._most >> 20} MiB")

    @property
    def ended(self) -> bool:
        return self._over.done()

    def tell(self, line: bytes, *, last: bool = False) -> None:
        """Write to its input, without waiting for it to read. last: nothing more will come."""
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        if not pipe.is_closing():
            pipe.write(line)
        if last:
            pipe.close()

    async def ended_within(self, limit_s: float, *others: asyncio.Future[Any]) -> bool:
        """Wait for its end or another event, up to a limit; True if it has ended."""
        await asyncio.wait({self._over, *others}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return self.ended

    async def close(self) -> str:
        """End it with all that it has started. Returns how it ended, in words; "" for status 0."""
        self._signal(signal.SIGTERM)  # to its keepers, which kill everything below them
        if not await self.ended_within(CLOSE_S):
            self._signal(signal.SIGKILL)
            await self.ended_within(CLOSE_S)
        code = self._transport.get_returncode()
        self._transport.close()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        if self._flood or code == 0:
            return self._flood
        how = describe(code) if code is not None else "it does not end"
        return f"ended with {how}{self.last_words()}"

    def last_words(self, since: int = 0) -> str:
        """The last lines of its errors, for the end of a sentence; "" where there are none.

        since: what `complained` was before those that matter.
        """
        fresh = self.complained - since
        lines = self._errors[-fresh:].decode(errors="replace").strip().splitlines() if fresh else []
        words = [line for line in lines if line.strip(" ^~")]  # without the marks under a line of Python
        return f"; its last words: {clip(' / '.join(words[-3:]))}" if words else ""

    def _stop(self, why: str) -> None:
        self._flood, self._begun = self._flood or why, b""
        self._hear = lambda line: None
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._transport.get_returncode() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), number)


async def _closed(started: tuple[asyncio.BaseTransport, AgentProcess]) -> None:
    await started[1].close()
