"""What the trainer's process did: spans, counters, and the memory it peaked at."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.observability.memory import PeakMemory
from tidemill.types import Span, Telemetry


class Recorder:
    def __init__(self, process: str) -> None:
        self.process = process
        self.counters: dict[str, float] = {}
        self._spans: list[Span] = []
        self.memory = PeakMemory()

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self._spans.append(Span(name, start, end, dict(args)))
            self.count(f"{name}_s", end - start)

    def count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def drain(self) -> Telemetry:
        """Everything since the last call; counters go on growing."""
        spans, self._spans = self._spans, []
        return Telemetry(self.process, os.getpid(), spans, dict(self.counters), self.memory.peak or self.memory.update())
