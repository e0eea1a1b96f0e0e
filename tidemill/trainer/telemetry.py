"""Telemetry of the trainer's process: spans, counters and peak memory."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tidemill.core.types import Telemetry
from tidemill.observability.process_memory import PeakMemory
from tidemill.observability.timeline import HANDOVER, Beside, Idle

T = TypeVar("T")


class Offload(Protocol):
    """Runs a blocking function and awaits its result. Calls must not overlap, as they share a decoder."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class Recorder:
    """Spans, counters and memory of one process, until `drain` hands them out."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.counters: dict[str, float] = {}
        self._spans, self._idle = Beside(), Idle()
        self.memory = PeakMemory()

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        start = time.monotonic()
        try:
            with self._spans.span(name, **args):
                yield
        finally:
            self.count(f"{name}_s", time.monotonic() - start)

    async def asked(self, offload: Offload, work: Callable[[], T]) -> T:
        """Await work that `offload` does, and record idle and handover time.

        The trainer is idle while nothing is awaited. Handover between threads lasts from the call to the start of the work,
        and from its end to the moment when the caller notices.
        """
        handed, noticed = self._spans.begin(HANDOVER), False

        def timed() -> T:
            nonlocal handed
            self._spans.end(handed)
            try:
                return work()
            finally:
                if not noticed:  # the caller may have been cancelled
                    handed = self._spans.begin(HANDOVER)

        with self._idle.asked():
            try:
                return await offload(timed)
            finally:
                noticed = True
                self._spans.end(handed)

    def count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def drain(self) -> Telemetry:
        """Telemetry since the last call, running spans included; counters keep growing."""
        spans = [*self._spans.take(), *self._idle.take()]
        return Telemetry(self.process, os.getpid(), spans, dict(self.counters), self.memory.peak or self.memory.update())
