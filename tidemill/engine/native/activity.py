"""What an engine did and when, for `Engine.telemetry`."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager

from tidemill.core.types import Span
from tidemill.observability.timeline import Beside, Idle

GAP_S = 0.002  # steps closer than this are one span
MOST_SPANS = 4096  # kept between two calls of `take`; the oldest go first


class Activity:
    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "cached_tokens", "steps", "busy_s", "preemptions"), 0.0
        )
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._busy: Span | None = None
        self._left: float | None = None  # since when others have the process
        self._away: Span | None = None  # what they had of it before the next step
        self._beside, self.idle = Beside(), Idle()  # what goes on in threads; when there is nothing to compute

    def step(self, start: float, end: float) -> None:
        """A step ran from `start` to `end`, seconds of the monotonic clock."""
        self.counters["steps"] += 1
        self.counters["busy_s"] += end - start
        if self._busy is not None and start - self._busy.end < GAP_S:
            self._busy.end, self._away = end, None
            return
        if self._away is not None:
            self._spans.append(self._away)
            self._away = None
        self._busy = Span("generate", start, end)
        self._spans.append(self._busy)

    def leave(self) -> None:
        """The loop lets others have the process: what takes calls in and sends results, and whatever else lives there."""
        self._left = time.monotonic()

    def back(self, between: bool = False) -> None:
        """It has the process again. between: two steps, which are one span where they are close."""
        assert self._left is not None
        away = Span("yield", self._left, time.monotonic())
        self._left = self._away = None
        if between:
            self._away = away
        else:
            self._spans.append(away)

    def span(self, name: str, start: float, end: float, **args: float) -> None:
        self._spans.append(Span(name, start, end, args))

    def beside(self, name: str, **args: float) -> AbstractContextManager[None]:
        """Something that goes on while steps are run."""
        return self._beside.span(name, **args)

    def take(self) -> list[Span]:
        """The spans since the last call. A stretch that goes on begins anew."""
        if self._left is not None:
            self.back()
            self.leave()
        spans, self._busy = [*self._spans, *self._beside.take(), *self.idle.take()], None
        self._spans.clear()
        return spans
