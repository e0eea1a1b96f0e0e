"""What the trainer's process did: spans, counters, and the memory it peaked at."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.types import Span, Telemetry


class Recorder:
    def __init__(self, process: str) -> None:
        self.process = process
        self.counters: dict[str, float] = {}
        self._spans: list[Span] = []
        self._peak = 0

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

    def sample_memory(self) -> None:
        self._peak = max(self._peak, memory_bytes())

    def drain(self) -> Telemetry:
        """Everything since the last call; counters go on growing."""
        self.sample_memory()
        spans, self._spans = self._spans, []
        return Telemetry(self.process, os.getpid(), spans, dict(self.counters), self._peak)


def memory_bytes() -> int:
    """This process's proportional set size now (shared pages counted by their share), else its peak resident size."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:  # not Linux, or not allowed to know
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
