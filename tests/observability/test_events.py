"""Events in words: legible without the source, and the same wherever they are shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tidemill.observability.events import worded
from tidemill.run.session import Session


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        ("engine_restarted", {"engine": "engine-0", "after_s": 1.0}, "engine restarted: engine-0, after 1 s"),
        ("engine_lost", {"engine": "engine-0", "how": "ended by SIGKILL"}, "engine lost: engine-0, ended by SIGKILL"),
        ("judging_paused", {"verifier": "m", "share": 0.255, "reason": "down"}, "judging paused: m, share 26%, down"),
        ("judging_resumed", {"verifier": "m", "seconds": 12.34567}, "judging resumed: m, for 12.346 s"),
        ("checkpoint", {"step": 50}, "checkpoint: step 50"),
        ("checkpoint", {"step": 0}, "checkpoint: step 0"),
        ("rollouts_found", {"groups": [3, 5]}, "rollouts found: groups 3, 5"),
        ("rollouts_found", {"groups": list(range(10))}, "rollouts found: groups 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
        (
            "reward_check",
            {"verdicts": {"gold": "ok", "empty": "ok"}, "accepted": {}},
            "reward check: verdicts gold ok, empty ok",
        ),
        ("stopped", {"loss": None, "why": ""}, "stopped"),
    ],
)
def test_names_values_and_units(kind: str, detail: dict, said: str) -> None:
    assert worded(kind, detail) == said


def test_the_user_and_the_ledger_are_told_the_same() -> None:
    noted, kept = [], []
    session = SimpleNamespace(ledger=SimpleNamespace(event=lambda *event: kept.append(event)), note=noted.append)
    detail = {"engine": "engine-0", "after_s": 1.5, "log": "first line\nsecond line"}
    Session.record_event(session, "engine_restarted", detail)  # type: ignore[arg-type]
    assert kept == [("engine_restarted", detail)]
    assert noted == ["engine restarted: engine-0, after 1.5 s, first line"]  # a note is a line
