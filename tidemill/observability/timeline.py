"""Recorders of a process's time: one sequence of phases, overlapping spans, idle time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.core.types import Span

REST = "other"
IDLE = "idle"  # nothing is asked of the process
HANDOVER = "handover"  # work waits for its thread, or its result for the caller


class Timeline:
    """One sequence of phases without gaps; each moment belongs to the innermost open phase.

    Where no phase is open, it is `REST`. Another task of the same thread may open a phase too, if it closes it before it
    awaits anything.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._open, self._since = clock, [REST], clock()
        self._spans: list[Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def take(self) -> list[Span]:
        """The spans since the last call, or since the beginning. An open phase goes on."""
        self._turn()
        spans, self._spans = self._spans, []
        return spans

    def _turn(self) -> None:
        now = self._clock()
        if now > self._since:
            self._spans.append(Span(self._open[-1], self._since, now))
        self._since = now


class Beside:
    """Spans that may overlap, opened and closed by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._ids, self._lock = clock, itertools.count(), threading.Lock()  # bounded: held for list operations
        self._open: dict[int, Span] = {}
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        key = self.begin(name, **args)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, name: str, **args: float) -> int:
        """Open a span; return the key by which `end` closes it, perhaps in another thread."""
        with self._lock:
            key = next(self._ids)
            self._open[key] = Span(name, self._clock(), 0.0, args)
            return key

    def end(self, key: int) -> None:
        """Close a span. Closing it again does nothing."""
        with self._lock:
            if (span := self._open.pop(key, None)) is not None:
                span.end = self._clock()
                self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans since the last call. An open span is cut here; the rest comes with a later call."""
        with self._lock:
            now, spans = self._clock(), self._spans
            for span in self._open.values():
                spans.append(Span(span.name, span.start, now, span.args))
                span.start = now
            self._spans = []
            return spans


class Idle:
    """The time in which a process has nothing to do. Other time without a name is missing from the breakdown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._calls = clock, 0
        self._since = clock()
        self._spans: list[Span] = []

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Mark that there is something to do. Such blocks may overlap, in one thread."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        self._cut()
        self._calls += 1

    def end(self) -> None:
        self._cut()
        self._calls -= 1

    def take(self) -> list[Span]:
        """The idle spans since the last call. Idle time that goes on is cut here."""
        self._cut()
        spans, self._spans = self._spans, []
        return spans

    def _cut(self) -> None:
        now = self._clock()
        if not self._calls and now > self._since:
            self._spans.append(Span(IDLE, self._since, now))
        self._since = now
