"""Client of the guard process, which kills a pool's workers if this process dies (see `guard`)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tidemill.runtime.workers import guard
from tidemill.runtime.workers.child import MARK, REAP_LIMIT_S, closed


class Guard:
    """Handle of a guard process: `await start()`, then `add` and `discard` process groups."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()  # bounded: it covers the start of one process, which does not wait for it

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the guard process unless it runs."""
        async with self._lock:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(Path(guard.__file__)), MARK),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )

    def add(self, group: int) -> None:
        self._tell("+", group)

    def discard(self, group: int) -> None:
        self._tell("-", group)

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.wait_for(self._process.wait(), REAP_LIMIT_S)
            await closed(self._process.stdin)
            self._process = None

    def _tell(self, sign: str, group: int) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{sign}{group}\n".encode())
