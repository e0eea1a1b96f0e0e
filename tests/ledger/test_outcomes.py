"""Outcomes are rows of their own: a judgement adds one, the first is trained on, and none is changed or deleted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import OUTCOMES, group, task

from tidemill.core.types import GREEDY, Group, InfraError, Outcome, Score, Unscorable
from tidemill.ledger import SqliteLedger
from tidemill.ledger.records import Earned

ROW = "INSERT {how} INTO outcomes VALUES ({g}, {s}, {n}, 1.0, 'score', 0.5, NULL, NULL, NULL, NULL, 'by hand')"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    with SqliteLedger(tmp_path / "run", durability="process") as ledger:
        ledger.judged_by("spell")
        yield ledger


def record(ledger: SqliteLedger, *groups: Group) -> None:
    for each in groups:
        ledger.admit(each.id, each.task)
        ledger.finish(each)


def asked(ledger: SqliteLedger, sql: str) -> list[tuple]:
    return list(map(tuple, ledger._rows(sql)))


def of(group_id: int, *outcomes: Outcome | None, **more: int) -> Group:
    found = replace(group(group_id, samples=len(outcomes)), task=replace(task(group_id), env=""))
    for each, outcome in zip(found.trajectories, outcomes, strict=True):
        each.outcome = outcome
        for name, value in more.items():
            setattr(each, name, value)
    return found


def test_each_judged_attempt_has_a_row(ledger: SqliteLedger) -> None:
    scored = Score(0.25, {"format": 1.0}, (0.5, 0.25), (1.0, -1.0))
    record(ledger, of(0, scored, Unscorable("no gold answer"), InfraError("verifier died"), None))
    assert asked(ledger, "SELECT sample, judgement, outcome, reward, reason, parts, turns, seats, judge FROM outcomes") == [
        (0, 0, "score", 0.25, None, '{"format":1.0}', "[0.5, 0.25]", "[1.0, -1.0]", "spell"),
        (1, 0, "unscorable", None, "no gold answer", None, None, None, "spell"),
        (2, 0, "infra_error", None, "verifier died", None, None, None, "spell"),
    ]
    named = replace(of(1, Score(1.0)), task=replace(task(1), env="one of several"))
    record(ledger, named)
    assert asked(ledger, "SELECT judge FROM outcomes WHERE group_id = 1") == [("one of several",)]


def test_trajectories_of_an_attempt_share_its_outcome(ledger: SqliteLedger) -> None:
    """The last one holds it; an attempt counts once, however many trajectories it has."""
    branches = of(0, None, Score(1.0), Score(0.5))
    for each, sample in zip(branches.trajectories, (0, 0, 1), strict=True):
        each.sample = sample
    record(ledger, branches)
    ledger.begin_step(0, 0, [0])
    assert asked(ledger, "SELECT sample, reward FROM outcomes") == [(0, 1.0), (1, 0.5)]
    assert [(row.place, row.reward) for row in ledger.samples(order="recent")] == [(0, None), (1, 1.0), (2, 0.5)]
    assert [rewards for *_, rewards in ledger.history()] == [[1.0, 0.5]]
    assert ledger.experience(0, 1) == [(0, [1.0, 0.5], 0)]
    assert (ledger.earned().attempts, ledger.earned().scored, ledger.earned().varied) == (2, 2, 1)


def test_a_later_judgement_is_listed_and_training_goes_by_the_first(ledger: SqliteLedger) -> None:
    record(ledger, of(0, Score(0.0), Score(1.0)), of(1, Score(0.5), Score(0.5)), of(2, Score(9.0), sample=GREEDY))
    ledger.begin_step(0, 0, [0, 1])

    def read() -> tuple:
        return list(ledger.history()), ledger.experience(0, 1), ledger.earned()

    before = read()
    assert before[1] == [(0, [0.0, 1.0], 0), (1, [0.5, 0.5], 0)]
    assert isinstance(before[2], Earned) and (before[2].attempts, before[2].solved, before[2].varied) == (4, 1, 1)
    later = {0: {0: Score(1.0), 1: InfraError("down")}, 1: {1: Score(0.75)}}
    ledger.judge_again(later, "fixed.py:score")
    ledger.judge_again({0: {0: Unscorable("no")}}, "third")
    assert read() == before and ledger.load(0).rewards.tolist() == [0.0, 1.0]
    rows = {(row.group_id, row.sample): row for row in ledger.samples(order="recent")}
    assert [(j.judgement, j.outcome, j.reward, j.reason, j.judge) for j in rows[0, 0].later] == [
        (1, "score", 1.0, None, "fixed.py:score"),
        (2, "unscorable", None, "no", "third"),
    ]
    shown = {key: (row.reward, row.latest) for key, row in rows.items() if key[0] < 2}
    assert shown == {(0, 0): (0.0, None), (0, 1): (1.0, None), (1, 0): (0.5, 0.5), (1, 1): (0.5, 0.75)}
    columns = "group_id, sample, reward, judge, latest_outcome, latest_reward, judgements"
    assert asked(ledger, f"SELECT {columns} FROM attempts") == [
        (0, 0, 0.0, "spell", "unscorable", None, 3),
        (0, 1, 1.0, "spell", "infra_error", None, 2),
        (1, 0, 0.5, "spell", "score", 0.5, 1),
        (1, 1, 0.5, "spell", "score", 0.75, 2),
        (2, GREEDY, 9.0, "spell", "score", 9.0, 1),
    ]  # fmt: skip
    assert [row.reward for row in ledger.samples(order="worst", limit=2)] == [0.0, 0.5], "by what was trained on"


REFUSED = {
    "change": "UPDATE outcomes SET reward = 1.0",
    "change to the same": "UPDATE outcomes SET outcome = outcome",
    "delete": "DELETE FROM outcomes WHERE group_id = 0",
    "delete of a pending group's": "DELETE FROM outcomes WHERE group_id = 1",
    "replace": ROW.format(how="OR REPLACE", g=0, s=0, n=0),
    "a number again": ROW.format(how="", g=0, s=0, n=0),
    "a number left out": ROW.format(how="", g=0, s=0, n=2),
    "no group": ROW.format(how="", g=7, s=0, n=0),
    "another word": ROW.format(how="", g=0, s=0, n=1).replace("'score'", "'fine'"),
    "a reward without a score": ROW.format(how="", g=0, s=0, n=1).replace("'score'", "'unscorable'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_database_keeps_outcomes(ledger: SqliteLedger, what: str) -> None:
    record(ledger, of(0, Score(0.0)), of(1, Score(0.0)))
    ledger.begin_step(0, 0, [0])
    before = asked(ledger, "SELECT * FROM outcomes")
    with sqlite3.connect(ledger.folder / "ledger.sqlite") as by_hand:
        by_hand.execute("PRAGMA foreign_keys = ON")
        with pytest.raises(sqlite3.IntegrityError):
            by_hand.execute(REFUSED[what])
        by_hand.execute(ROW.format(how="", g=0, s=0, n=1))
    by_hand.close()
    assert asked(ledger, "SELECT * FROM outcomes WHERE judgement = 0") == before


def test_an_attempt_that_is_sampled_again_is_judged_from_the_start(ledger: SqliteLedger) -> None:
    record(ledger, of(0, Score(0.0)), of(1, Score(0.0)))
    ledger.judge_again({1: {0: Score(0.5)}}, "other")
    ledger.renounce(1, "its payload is gone")
    assert asked(ledger, "SELECT group_id FROM outcomes") == [(0,)]
    ledger.finish(of(1, Score(1.0)))
    assert asked(ledger, "SELECT group_id, judgement, reward FROM outcomes") == [(0, 0, 0.0), (1, 0, 1.0)]


@pytest.mark.parametrize("other", [None, *OUTCOMES])
def test_payloads_made_again_have_to_have_the_same_outcome(ledger: SqliteLedger, other: Outcome | None) -> None:
    record(ledger, of(0, Score(0.25, {"format": 1.0})))
    assert ledger.record_again(of(0, other)) == (other == Score(0.25, {"format": 1.0}))


def test_rows_that_a_kill_took_are_judged_by_the_same_name(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "run", durability="process")
    ledger.judged_by("spell")
    record(ledger, of(0, Score(1.0)))
    ledger._waiting.clear()  # as a kill would
    ledger.close()
    with SqliteLedger(tmp_path / "run", mode="open", durability="process") as ledger:
        assert ledger.events("rollouts_found")
        assert asked(ledger, "SELECT reward, judge FROM outcomes") == [(1.0, "spell")]
