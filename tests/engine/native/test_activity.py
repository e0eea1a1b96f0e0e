"""What an engine says of its time: every moment between two calls of `take` has a name."""

from __future__ import annotations

import pytest

from tidemill.core.types import Span
from tidemill.engine.native import activity
from tidemill.engine.native.activity import GAP_S, Activity
from tidemill.observability.timeline import IDLE
from tidemill.observability.trace import length, merged


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(activity, "time", found)
    return found


def seconds(spans: list[Span], name: str) -> float:
    return length(merged(spans, [name]))


def worked(clock: Clock, found: Activity, step_s: float, away_s: float) -> None:
    found.step(clock.now, clock.now + step_s)
    clock.now += step_s
    found.leave()
    clock.now += away_s
    found.back(between=True)


def test_steps_that_are_close_are_one_span_and_others_say_what_is_between(clock: Clock) -> None:
    found = Activity()
    worked(clock, found, 1.0, GAP_S / 2)
    worked(clock, found, 1.0, GAP_S * 2)
    worked(clock, found, 1.0, 0.0)
    spans = found.take()
    assert [s.name for s in spans if s.name != IDLE] == ["generate", "yield", "generate"]
    assert length(merged(s for s in spans if s.name != IDLE)) == pytest.approx(clock.now)


def test_what_goes_on_is_cut(clock: Clock) -> None:
    found = Activity()
    worked(clock, found, 1.0, 0.0)
    found.leave()
    clock.now += 3.0
    first = found.take()
    clock.now += 2.0
    found.back()
    second = found.take()
    assert seconds(first, "yield") == 3.0 and seconds(second, "yield") == 2.0


def test_the_gap_that_is_bridged_is_the_gap_that_is_not_told(clock: Clock) -> None:
    """A yield that is a little shorter than the gap between its steps must not fall between the two."""
    found = Activity()
    worked(clock, found, 1.0, GAP_S * 0.9)
    clock.now += GAP_S * 0.2
    worked(clock, found, 1.0, 0.0)
    spans = found.take()
    assert seconds(spans, "yield") == pytest.approx(GAP_S * 0.9) and seconds(spans, "generate") == 2.0
