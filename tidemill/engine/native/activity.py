"""Counters and time spans of an engine, for `Engine.telemetry` and `Engine.stats`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from tidemill.core.interfaces import EngineStats
from tidemill.core.types import Span, Version
from tidemill.engine.native.scheduler import Scheduler
from tidemill.observability.timeline import Beside, Idle

CHECK_REST = 50  # times the duration of a check until the next one
GAP_S = 0.002  # steps closer than this count as one span
MOST_SPANS = 4096  # spans kept between two calls of `take`; the oldest are dropped first


class Activity:
    """Records steps, yields to other tasks, and work beside the steps."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("generated_tokens", "drafted_tokens", "accepted_tokens", "prompt_tokens", "cached_tokens", "lost_tokens"),
                *("steps", "busy_s", "preemptions"),
            ),
            0.0,
        )
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._busy: Span | None = None
        self._left: float | None = None  # time since which other tasks run
        self._away: Span | None = None  # their span before the next step
        self._beside, self.idle = Beside(), Idle()  # work in threads; times without work
        self._asleep: tuple[int, float] | None = None  # the open span of its sleep, and when it began
        self._slept = 0.0  # seconds, in sleeps that are over
        self._next_check = 0.0

    def step(self, start: float, end: float) -> None:
        """Record a step from `start` to `end`, seconds of the monotonic clock."""
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

    def count(self, **amounts: float) -> None:
        """Add to counters by name."""
        for name, amount in amounts.items():
            self.counters[name] += amount

    def stats(self, scheduler: Scheduler, version: Version) -> EngineStats:
        """The engine's load and progress. version: that was committed last."""
        return EngineStats(
            waiting=scheduler.waiting_count,
            running=len(scheduler.running),
            version=version,
            kv_used=1 - scheduler.blocks.available / scheduler.blocks.usable,
            generated=int(self.counters["generated_tokens"]),
            preemptions=scheduler.preemptions,
            prompt_tokens=int(self.counters["prompt_tokens"]),
            cached_tokens=int(self.counters["cached_tokens"]),
            drafted_tokens=int(self.counters["drafted_tokens"]),
            accepted_tokens=int(self.counters["accepted_tokens"]),
        )

    def leave(self) -> None:
        """Note that the loop yields to other tasks, such as those that take calls and send results."""
        self._left = time.monotonic()

    def back(self, between: bool = False) -> None:
        """Note that the loop runs again. between: two steps follow; close ones are one span."""
        assert self._left is not None
        away = Span("yield", self._left, time.monotonic())
        self._left = self._away = None
        if between:
            self._away = away
        else:
            self._spans.append(away)

    def span(self, name: str, start: float, end: float, **args: float) -> None:
        """Record a span from `start` to `end`, seconds of the monotonic clock."""
        self._spans.append(Span(name, start, end, args))

    def check(self, work: Callable[[], None]) -> None:
        """Do a check, and record it, in at most 2 % of the time: with slow tools an engine often runs out of work."""
        if (begin := time.monotonic()) >= self._next_check:
            work()
            end = time.monotonic()
            self._next_check = end + CHECK_REST * (end - begin)
            self.span("check", begin, end)

    def beside(self, name: str, **args: float) -> AbstractContextManager[None]:
        """Context manager that records work beside the steps."""
        return self._beside.span(name, **args)

    def fall_asleep(self, lost: int) -> None:
        """Note that the engine sleeps from now on. lost: tokens that its prefix cache held."""
        self.counters["lost_tokens"] += lost
        self._asleep = self._beside.begin("asleep"), time.monotonic()

    def wake_up(self) -> None:
        assert self._asleep is not None
        self._slept = self.slept_s
        self._beside.end(self._asleep[0])
        self._asleep = None

    @property
    def slept_s(self) -> float:
        """Seconds of sleep so far, with those of a sleep that goes on."""
        return self._slept + (0.0 if self._asleep is None else time.monotonic() - self._asleep[1])

    def take(self) -> list[Span]:
        """The spans since the last call. A span that is still open is split there."""
        if self._left is not None:
            self.back()
            self.leave()
        spans, self._busy = [*self._spans, *self._beside.take(), *self.idle.take()], None
        self._spans.clear()
        return spans
