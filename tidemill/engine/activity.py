"""What an engine did and when, for `Engine.telemetry`."""

from __future__ import annotations

from collections import deque

from tidemill.types import Span

GAP_S = 0.002  # steps closer than this are one span
MOST_SPANS = 4096  # kept between two calls of `take`; the oldest go first


class Activity:
    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            ("generated_tokens", "prompt_tokens", "cached_tokens", "steps", "busy_s", "preemptions"), 0.0
        )
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._busy: Span | None = None

    def step(self, start: float, end: float) -> None:
        """A step ran from `start` to `end`, seconds of the monotonic clock."""
        self.counters["steps"] += 1
        self.counters["busy_s"] += end - start
        if self._busy is not None and start - self._busy.end < GAP_S:
            self._busy.end = end
            return
        self._busy = Span("generate", start, end)
        self._spans.append(self._busy)

    def span(self, name: str, start: float, end: float, **args: float) -> None:
        self._spans.append(Span(name, start, end, args))

    def take(self) -> list[Span]:
        """The spans since the last call. A busy stretch that goes on begins anew."""
        spans, self._busy = list(self._spans), None
        self._spans.clear()
        return spans
