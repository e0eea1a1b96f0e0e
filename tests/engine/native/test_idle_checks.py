"""An engine that often runs out of work spends little of its time on checks."""

from __future__ import annotations

import pytest

from tidemill.engine.native import activity


def test_checks_take_at_most_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch):
    now, done = [100.0], list[float]()
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    under_test = activity.Activity()

    def check() -> None:
        done.append(now[0])
        now[0] += 2.0

    for moment in (100.0, 103.0, 201.9, 202.0, 203.0):
        now[0] = max(now[0], moment)
        under_test.check(check)
    assert done == [100.0, 202.0]
    assert [(s.start, s.end) for s in under_test.take() if s.name == "check"] == [(100, 102), (202, 204)]
