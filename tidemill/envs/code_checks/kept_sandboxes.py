"""Sandboxes that a process keeps between calls of a reward, in an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

from tidemill.runtime.workers import serve_calls
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import SandboxSettings

T = TypeVar("T")
LIMIT_S = 600.0  # far above what the caller's own limits allow


class _KeptSandboxes:
    """An event loop in a thread, and the open sandboxes in it by their settings."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: dict[SandboxSettings, Sandbox] = {}
        threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True).start()
        serve_calls.KEPT.append(lambda: set[int]().union(*(each.processes for each in self._open.values())))

    def use(self, settings: SandboxSettings, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        return asyncio.run_coroutine_threadsafe(self._used(settings, use), self._loop).result(LIMIT_S)

    async def _used(self, settings: SandboxSettings, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        if settings not in self._open:
            self._open[settings] = await Sandbox(settings).__aenter__()  # it ends with this process
        return await use(self._open[settings])


@cache
def kept_sandboxes() -> _KeptSandboxes:
    """The sandboxes of this process."""
    return _KeptSandboxes()
