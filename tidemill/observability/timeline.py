"""What goes on in a process, for the account of its time: one flow of control, and things beside one another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.types import Span

REST = "other"


class Timeline:
    """One flow of control, without gaps: every moment belongs to the innermost phase that is open, else to `REST`."""

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
        """Since the last call, or the beginning; what is open goes on."""
        self._turn()
        spans, self._spans = self._spans, []
        return spans

    def _turn(self) -> None:
        now = self._clock()
        if now > self._since:
            self._spans.append(Span(self._open[-1], self._since, now))
        self._since = now


class Beside:
    """Things that go on side by side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._ids = clock, itertools.count()
        self._open: dict[int, Span] = {}
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        key = next(self._ids)
        self._open[key] = Span(name, self._clock(), 0.0, args)
        try:
            yield
        finally:
            span = self._open.pop(key)
            span.end = self._clock()
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Since the last call. What is open is cut here: its other part comes with a later call."""
        now, spans = self._clock(), self._spans
        for span in self._open.values():
            spans.append(Span(span.name, span.start, now, span.args))
            span.start = now
        self._spans = []
        return spans
