"""What the ledger promises, call by call: fates, steps, replays, reads, modes, the lock, and errors of the disk."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_cases import OLDER, assert_same, group, older_ledger, task, trajectory

from tidemill.core import serialization
from tidemill.core.attempt_checks import check_row
from tidemill.core.errors import ConfigError, LedgerError, RunFolderError
from tidemill.core.interfaces import Ledger
from tidemill.core.types import GREEDY, Finish, Score, Task, Trajectory, Version
from tidemill.ledger import Counts, SqliteLedger, has_ledger, queries
from tidemill.ledger.records import Undone


@pytest.fixture
def ledger(tmp_path: Path):
    with SqliteLedger(tmp_path / "run") as opened:
        yield opened


def fill(ledger: SqliteLedger, ids) -> None:
    for i in ids:
        ledger.admit(i, task(i))
        ledger.finish(group(i))


def raw(ledger: SqliteLedger) -> sqlite3.Connection:
    return sqlite3.connect(ledger.folder / "ledger.sqlite", isolation_level=None)


def test_it_is_the_protocol(ledger: SqliteLedger) -> None:
    as_protocol: Ledger = ledger
    for name in ("admit", "finish", "drop", "begin_step", "end_step", "publish", "evaluation", "event"):
        assert callable(getattr(as_protocol, name))


def test_a_group_through_its_life(ledger: SqliteLedger) -> None:
    fill(ledger, range(4))
    ledger.admit(4, task(4))
    assert [(p.id, p.finished) for p in ledger.pending()] == [(0, True), (1, True), (2, True), (3, True), (4, False)]
    assert ledger.pending()[2].task == task(2)
    ledger.drop(1, "zero_variance")
    ledger.begin_step(0, 0, [2, 0])
    assert ledger.counts() == Counts(5, 2, {"zero_variance": 1}, 2, 0, 0) and ledger.counts().conserved
    ledger.end_step(0, 0, {"reward/mean": 0.5, "broken": math.nan, "numpy": np.float32(2)})
    (step,) = ledger.steps()
    assert (step.step, step.incarnation, step.runs) == (0, 0, 1) and step.ended_at is not None
    assert step.metrics == {"reward/mean": 0.5, "broken": None, "numpy": 2.0}
    assert ledger.groups_of(0) == [2, 0]  # the order it was trained in
    assert ledger.last_step() == 0 and ledger.next_group_id() == 5


def test_the_history_is_what_each_group_earned_by_id_the_greedy_attempt_apart(ledger: SqliteLedger) -> None:
    fill(ledger, (0, 2))
    with_baseline = group(3)
    with_baseline.trajectories.append(replace(with_baseline.trajectories[0], sample=GREEDY, outcome=Score(7.0)))
    ledger.admit(3, task(3))
    ledger.finish(with_baseline)
    ledger.admit(4, task(4))
    ledger.drop(2, "zero-variance")
    ledger.begin_step(0, 0, [0])
    found = list(ledger.history())
    assert [(group_id, env, name) for group_id, env, name, _ in found] == [
        (i, "spell", f"word-{i % 5}") for i in (0, 2, 3, 4)
    ]
    expected = [[t.reward for t in group(i).trajectories] for i in (0, 2, 3)]
    np.testing.assert_equal([rewards for *_, rewards in found], [*expected, None])


def test_a_long_history_is_read_by_pages(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a million attempts at once, what reads them would keep 140 MB."""
    fill(ledger, range(11))
    whole = list(ledger.history())
    fetched: list[int] = []
    rows = ledger._rows
    monkeypatch.setattr(ledger, "_rows", lambda *given: fetched.append(len(found := rows(*given))) or found)
    monkeypatch.setattr(queries, "_PAGE", 4)
    assert list(ledger.history()) == whole and [group_id for group_id, *_ in whole] == list(range(11))
    assert fetched == [1, 8, 8, 6], "the greatest id, then the pages"
    assert list(ledger.history(since=5)) == whole[5:]


def test_a_step_is_asked_for_its_metrics_alone(ledger: SqliteLedger) -> None:
    fill(ledger, range(2))
    assert ledger.incarnation() == 0 and ledger.metrics_of(0) == {}
    ledger.begin_step(0, 0, [0])
    assert ledger.metrics_of(0) == {}, "it has not ended"
    ledger.end_step(0, 0, {"loss": 0.25})
    assert ledger.metrics_of(0) == {"loss": 0.25} and ledger.metrics_of(1) == {}
    ledger.replay_step(0, 2)
    ledger.end_step(0, 2, {"loss": 0.5})
    assert ledger.metrics_of(0) == {"loss": 0.5} and ledger.incarnation() == 2


def test_trajectories_come_back_as_they_were(ledger: SqliteLedger) -> None:
    fill(ledger, range(6))
    for i in range(6):
        assert_same(ledger.load(i), group(i))
    assert ledger.load_trajectory(3, 1).text == group(3).trajectories[1].text
    assert ledger.verify() == []
    row = (
        raw(ledger).execute("SELECT tokens, sampled, oldest, newest, temperature, mean_logprob FROM trajectories").fetchone()
    )
    first = group(0).trajectories[0]
    assert row[:5] == (12, 8, first.oldest, first.newest, 0.7)
    assert row[5] == pytest.approx(first.logprobs[first.mask].mean())


def test_given_tokens_are_recorded_and_a_record_from_before_them_is_read(ledger: SqliteLedger) -> None:
    given = group(0)
    for each in given.trajectories:
        n = len(each.tokens)
        each.mask, each.versions, each.logprobs = np.zeros(n, bool), np.full(n, -1, np.int32), np.zeros(n, np.float32)
        each.given, each.finish, each.sources, each.support = np.arange(n) >= 4, Finish.GIVEN, (), None
        check_row(each)
    ledger.admit(0, task(0))
    ledger.finish(given)
    assert [t.given.tolist() for t in ledger.load(0).trajectories if t.given is not None] == [[False] * 4 + [True] * 8] * 2
    assert [(row.finish, row.sampled, row.oldest) for row in ledger.samples(order="recent")] == [("given", 0, None)] * 2
    fields = msgspec.msgpack.decode(serialization.encode(group(1).trajectories[0]))
    assert fields.pop("given", "absent") is None  # as it was before there was such a field
    assert serialization.decode(msgspec.msgpack.encode(fields), Trajectory).given is None


@pytest.mark.parametrize("given", [np.ones(12, bool), np.zeros(11, bool), np.zeros(12, np.int32)])
def test_given_tokens_that_cannot_be_are_refused(given: np.ndarray) -> None:
    """Sampled as well, of another length, no flags."""
    record = trajectory(0, 0)
    check_row(record)
    record.given = given
    with pytest.raises(ValueError, match="given tokens"):
        check_row(record)


@pytest.mark.parametrize("schema", OLDER, ids=lambda path: path.stem)
def test_a_ledger_of_a_schema_before_is_gone_on_with(tmp_path: Path, schema: Path) -> None:
    run = older_ledger(tmp_path / "run", schema)
    for mode in ("open", "open"):
        with SqliteLedger(run, mode=mode, durability="process") as ledger:
            first = ledger.next_group_id()
            ledger.admit(first, task(first))
            ledger.finish(group(first))
            ledger.begin_step(first, 0, [first])
            assert ledger.replay_step(first, 1) == ([first], [])
    with SqliteLedger(run, mode="read") as ledger:
        assert ledger.counts().trained == 2 and ledger.counts().conserved


@pytest.mark.parametrize("schema", OLDER, ids=lambda path: path.stem)
def test_a_step_is_undone_in_a_ledger_of_any_schema(tmp_path: Path, schema: Path) -> None:
    run = older_ledger(tmp_path / "run", schema)
    with SqliteLedger(run, mode="open", durability="process") as ledger:
        for i in range(4):
            ledger.admit(i, task(i))
            ledger.finish(group(i))
        ledger.begin_step(0, 0, [0])
        ledger.begin_step(1, 0, [2, 1])
        ledger.evaluation(1, {"accuracy": 0.5})
        ledger.evaluation(2, {"accuracy": 1.0})
        assert ledger.undo_steps(1, [1]) == Undone(1, 1, unreadable=1, others=1)
        for again in ("fate = 'dropped', reason = 'x', step = NULL WHERE id = 0", "fate = NULL, reason = NULL WHERE id = 1"):
            with pytest.raises(sqlite3.IntegrityError, match="already has a fate"):
                raw(ledger).execute(f"UPDATE groups SET {again}")
        with pytest.raises(LedgerError, match="the last step begun is 0"):
            ledger.undo_steps(1, [1])
    with SqliteLedger(run, mode="open", durability="process") as ledger:  # its tables are those of a schema that is known
        assert ledger.fate(1) == "dropped: unreadable" and ledger.fate(2) == "dropped: undone"
        assert ledger.counts().conserved and ledger.counts().trained == 1 and ledger.undone_steps() == [(1, 0)]
        assert [e.step for e in ledger.evaluations()] == [1] and ledger.last_step() == 0 and ledger.incarnation() == 1
        assert ledger.metrics_of(1) == {} and ledger.groups_of(1) == []
        ledger.begin_step(1, 1, [3])
        assert ledger.counts().conserved and ledger.groups_of(1) == [3] and ledger.groups_of(1, 0) == [2, 1]
        (event,) = ledger.events("steps_undone")
        assert event.detail == {"first": 1, "last": 1, "unreadable": 1, "others": 1}


def test_a_trajectory_without_a_sampled_token_is_recorded(ledger: SqliteLedger) -> None:
    nothing, none = group(0), np.zeros(3)
    nothing.trajectories = [Trajectory(*(none.astype(d) for d in ("i4", "?", "f4", "i4")), Finish.CANCELLED, text="\ud800")]
    nothing.trajectories[0].text = ""
    ledger.admit(0, task(0))
    ledger.finish(nothing)
    assert (ledger.samples(order="recent")[0].sampled, ledger.samples(order="recent")[0].oldest) == (0, None)


FATES = {
    "drop after drop": (lambda s: s.drop(0, "again"), "was dropped (stale)"),
    "train after drop": (lambda s: s.begin_step(1, 0, [0]), "was dropped (stale)"),
    "drop after train": (lambda s: s.drop(1, "stale"), "was trained at step 0"),
    "train after train": (lambda s: s.begin_step(1, 0, [1]), "was trained at step 0"),
    "train in flight": (lambda s: s.begin_step(1, 0, [2]), "is in flight"),
    "train unknown": (lambda s: s.begin_step(1, 0, [9]), "was never admitted"),
    "train the same twice in a step": (lambda s: s.begin_step(1, 0, [3, 3]), "was trained at step 1"),
    "a step left out": (lambda s: s.begin_step(2, 0, [3]), "no step may be left out"),
    "a step begun again": (lambda s: s.begin_step(0, 1, [3]), "replayed, not begun again"),
    "a step of nothing": (lambda s: s.begin_step(1, 0, []), "without groups"),
    "train again what was dropped": (lambda s: s.begin_step(1, 0, [3], [0]), "an earlier step trained"),
    "train again what is trained now": (lambda s: s.begin_step(1, 0, [3], [3]), "an earlier step trained"),
    "train again twice at once": (lambda s: s.begin_step(1, 0, [3], [1, 1]), "UNIQUE"),
    "an end without a beginning": (lambda s: s.end_step(1, 0, {}), "not begun"),
    "finish twice": (lambda s: s.finish(group(3)), "has finished and is pending"),
    "finish dropped": (lambda s: s.finish(group(0)), "was dropped (stale)"),
    "finish dropped in flight": (lambda s: s.finish(group(4)), "was dropped (cancelled)"),
    "admit twice": (lambda s: s.admit(3, task(3)), "was admitted before"),
    "drop without a reason": (lambda s: s.drop(2, ""), "without a reason"),
    "load in flight": (lambda s: s.load(2), "has not finished"),
    "load unknown": (lambda s: s.load(9), "never admitted"),
    "replay the unbegun": (lambda s: s.replay_step(1, 0), "never begun"),
}


@pytest.mark.parametrize("case", FATES)
def test_what_contradicts_the_record_is_refused_and_changes_nothing(ledger: SqliteLedger, case: str) -> None:
    fill(ledger, (0, 1, 3))
    ledger.admit(2, task(2))
    ledger.admit(4, task(4))
    ledger.drop(0, "stale")
    ledger.drop(4, "cancelled")
    ledger.begin_step(0, 0, [1])
    before = "\n".join(raw(ledger).iterdump())
    call, message = FATES[case]
    with pytest.raises(LedgerError) as caught:
        call(ledger)
    assert message in str(caught.value)
    assert "\n".join(raw(ledger).iterdump()) == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET fate = 'dropped', reason = 'x', step = NULL, incarnation = NULL WHERE id = 0",
        "UPDATE groups SET fate = NULL, settled_at = NULL, step = NULL, incarnation = NULL WHERE id = 0",
        "UPDATE groups SET step = 7 WHERE id = 0",
        "UPDATE groups SET fate = 'trained', settled_at = 1, step = 5, incarnation = 0 WHERE id = 1",  # no such step
        "UPDATE groups SET fate = 'trained', settled_at = 1, step = 0, incarnation = 0 WHERE id = 2",  # never finished
        "UPDATE groups SET fate = 'dropped', settled_at = 1 WHERE id = 1",  # no reason
        "DELETE FROM groups WHERE id = 2",
        "INSERT INTO step_groups VALUES (0, 0, 1, 1)",  # of a pending group
        "INSERT INTO groups (id, task_key, admitted_at) VALUES (9, 99, 1)",  # no such task
        "INSERT INTO groups (id, task_key, admitted_at, fate, reason, settled_at) VALUES (9, 1, 1, 'dropped', 'x', 1)",
    ],
)
def test_the_database_itself_holds_the_fates(ledger: SqliteLedger, statement: str) -> None:
    fill(ledger, range(2))
    ledger.admit(2, task(2))
    ledger.begin_step(0, 0, [0])
    with pytest.raises(sqlite3.IntegrityError):
        ledger._db.execute(statement)


def test_what_is_trained_again_is_recorded_beside_the_fates(ledger: SqliteLedger) -> None:
    fill(ledger, range(6))
    ledger.begin_step(0, 0, [0, 1])
    ledger.begin_step(1, 0, [2, 3], [1])
    ledger.begin_step(2, 0, [4, 5], [2, 1])
    assert [ledger.trained_again(step) for step in range(3)] == [[], [1], [2, 1]]
    assert ledger.counts() == Counts(6, 6, {}, 0, 0, 0) and ledger.counts().conserved
    rewards = {i: [t.reward for t in group(i).trajectories if not math.isnan(t.reward)] for i in range(6)}
    uses = {0: 0, 1: 2, 4: 0}  # 2, 3 and 5 have no score
    assert ledger.experience(0, 3)[:3] == [(i, rewards[i], uses[i]) for i in (0, 1, 4) if rewards[i]]
    assert ledger.experience(0, 1) == [(i, rewards[i], 0) for i in (0, 1)], "later steps are of the future"
    assert ledger.replay_step(2, 0) == ([4, 5], [2, 1]) and ledger.replay_step(2, 1) == ([4, 5], [2, 1])
    assert ledger.trained_again(2, 0) == ledger.trained_again(2, 1) == ledger.trained_again(2) == [2, 1]
    assert ledger.experience(0, 3)[1][2] == 2, "what was run twice counts once"
    assert ledger.replay_step(2, 1, lost={1}) == ([4, 5], [2, 1]), "the same once more is the same"
    assert ledger.replay_step(2, 2, lost={1}) == ([4, 5], [2]) and ledger.trained_again(2) == [2]


def test_replays_keep_every_group_trained_once(ledger: SqliteLedger) -> None:
    fill(ledger, range(6))
    for step in range(3):
        ledger.begin_step(step, 0, [2 * step, 2 * step + 1])
        ledger.end_step(step, 0, {})
    # a checkpoint after step 0; bit-identical replay of step 1, then a new incarnation of step 2, then of both
    assert ledger.replay_step(1, 0) == ([2, 3], [])
    assert ledger.steps(since=1)[0].runs == 2 and ledger.steps(since=1)[0].ended_at is None
    ledger.end_step(1, 0, {})
    assert ledger.replay_step(2, 1) == ([4, 5], [])
    assert [(s.step, s.incarnation) for s in ledger.steps()] == [(0, 0), (1, 0), (2, 1)]
    assert [(s.step, s.incarnation) for s in ledger.steps(live=False)] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert ledger.counts() == Counts(6, 6, {}, 0, 0, 0)
    assert ledger.replay_step(1, 2) == ([2, 3], []) and ledger.replay_step(2, 2) == ([4, 5], [])
    assert ledger.counts().conserved and ledger.groups_of(2, 0) == ledger.groups_of(2) == [4, 5]
    with pytest.raises(LedgerError, match="incarnation 2 of it exists"):
        ledger.replay_step(2, 1)


def test_lost_and_trained_twice_are_seen(ledger: SqliteLedger) -> None:
    """The figures are computed from the record: break the record, behind the ledger's back, and they say so."""
    fill(ledger, range(6))
    ledger.begin_step(0, 0, [0, 1])
    ledger.begin_step(1, 0, [2, 3])
    db = raw(ledger)
    assert ledger.counts() == Counts(6, 4, {}, 2, 0, 0)
    # a new incarnation of step 1 that holds group 1 (already in step 0) in place of group 3
    db.execute("INSERT INTO steps (step, incarnation, begun_at) VALUES (1, 1, 1)")
    db.execute("INSERT INTO step_groups VALUES (1, 1, 0, 2), (1, 1, 1, 1)")
    assert ledger.counts() == Counts(6, 4, {}, 2, lost=1, trained_twice=1) and not ledger.counts().conserved
    # an admission id that was skipped: admitted no longer equals the sum of the fates
    ledger.admit(7, task(7))
    assert ledger.counts() == Counts(8, 4, {}, 3, lost=2, trained_twice=1)
    # a finished group of which no trajectory is recorded
    db.execute("DELETE FROM trajectories WHERE group_id = 5")
    assert ledger.counts().lost == 3
    # a group in a step that its fate does not know
    db.execute("DROP TRIGGER step_groups_trained")
    db.execute("INSERT INTO step_groups VALUES (1, 1, 2, 4)")
    assert ledger.counts().trained_twice == 2


def test_versions_have_one_fingerprint(ledger: SqliteLedger) -> None:
    first, second = Version(0, 0, "policy", "aa"), Version(1, 0, "policy", "bb")
    for version in (first, second, first):
        ledger.publish(version)
    ledger.publish(Version(1, 1, "policy", "cc"))
    assert ledger.versions() == [first, second, Version(1, 1, "policy", "cc")]
    with pytest.raises(LedgerError, match=r"policy@v1 was published with fingerprint 'bb' and is now 'xx'"):
        ledger.publish(Version(1, 0, "policy", "xx"))


def test_evaluations_events_and_meta(ledger: SqliteLedger) -> None:
    ledger.evaluation(0, {"eval/accuracy": 0.5, "eval/n": 64.0, "eval/length": 3.0})
    ledger.evaluation(10, {"accuracy": 0.75, "n": 64})
    ledger.evaluation(0, {"accuracy": 0.625, "n": 64})  # again, after a resume
    assert [(e.step, e.n, e.accuracy) for e in ledger.evaluations()] == [(0, 64, 0.625), (10, 64, 0.75)]
    ledger.event("checkpoint", {"step": 3})
    ledger.event("stopped", {"loss": math.inf, "why": ["a"]})
    assert [(e.kind, e.detail) for e in ledger.events()] == [
        ("checkpoint", {"step": 3}),
        ("stopped", {"loss": None, "why": ["a"]}),
    ]
    assert [e.detail for e in ledger.events("checkpoint")] == [{"step": 3}]
    ledger.set_meta("recipe", "abc")
    ledger.set_meta("recipe", "abd")
    assert ledger.meta()["recipe"] == "abd" and ledger.meta()["schema"] == "6"


def test_samples_rank_scores_only(ledger: SqliteLedger) -> None:
    fill(ledger, range(5))
    ledger.begin_step(0, 0, [0, 3])
    rewards = [s.reward for s in ledger.samples(order="best", limit=99)]
    assert rewards == sorted(rewards, reverse=True) and len(rewards) == 4
    assert ledger.samples(order="worst", limit=1)[0].reward == 0.25
    assert {s.group_id for s in ledger.samples(step=0, order="recent", limit=99)} == {0, 3}
    sample = ledger.samples(step=0, order="best", limit=1)[0]
    assert (sample.fate, sample.task, sample.text) == ("trained", task(0), group(0).trajectories[0].text)
    assert {s.outcome for s in ledger.samples(order="recent", limit=99)} == {"score", "unscorable", "infra_error", None}
    with pytest.raises(ValueError, match="worst, best, recent"):
        ledger.samples(order="random")  # type: ignore[arg-type]


def test_tasks_are_stored_once_and_hold_any_text(ledger: SqliteLedger) -> None:
    odd = Task(
        "odd", [{"role": "user", "content": "half \ud800 a pair, ✓ and \x00"}], {"nested": {"a": [1, None, True]}}, "e"
    )
    for i in range(3):
        ledger.admit(i, odd)
    ledger.admit(3, Task("odd", "another prompt", {}, "e"))
    assert ledger.pending()[1].task == odd
    assert raw(ledger).execute("SELECT count(*) FROM tasks").fetchone() == (2,)
    with pytest.raises(LedgerError, match="task 'bad' holds something that is not plain JSON"):
        ledger.admit(4, Task("bad", "x", {"set": {1, 2}}))
    with pytest.raises(LedgerError, match="group 3 cannot be recorded"):
        broken = group(3)
        broken.trajectories[0].tokens = np.zeros(2, np.complex64)
        ledger.finish(broken)
    ledger.finish(group(3))


def test_modes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not has_ledger(run)
    for mode in ("open", "read"):
        with pytest.raises(RunFolderError, match="is not a run folder"):
            SqliteLedger(run, mode=mode)
    with SqliteLedger(run) as ledger:
        fill(ledger, range(2))
        with SqliteLedger(run, mode="read") as reader:  # beside the live writer
            assert reader.counts() == ledger.counts()
            fill(ledger, (2,))
            ledger.event("now", {})  # rows that wait are written with it
            assert reader.counts().admitted == 3 and reader.load(2).id == 2
            with pytest.raises(LedgerError, match="for reading only"):
                reader.drop(0, "x")
    assert has_ledger(run)
    with pytest.raises(RunFolderError, match="holds a ledger already"):
        SqliteLedger(run)
    with SqliteLedger(run, mode="open") as ledger:
        assert ledger.counts().pending == 3
        fill(ledger, (3,))
        assert_same(ledger.load(1), group(1))
    assert sorted(p.name for p in (run / "trajectories").iterdir()) == ["seg-000001.bin", "seg-000002.bin"]
    sqlite3.connect(run / "ledger.sqlite").execute("UPDATE meta SET value = '99' WHERE key = 'schema'").connection.commit()
    with pytest.raises(RunFolderError, match="schema 99"):
        SqliteLedger(run, mode="open")


def test_a_start_that_was_killed_before_its_first_commit_is_no_run(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "ledger.sqlite").execute("PRAGMA journal_mode = WAL").connection.close()
    assert not has_ledger(tmp_path)
    with pytest.raises(RunFolderError, match="a start was interrupted"):
        SqliteLedger(tmp_path, mode="open")
    with SqliteLedger(tmp_path) as ledger:
        assert ledger.counts().admitted == 0


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database at all, and long enough to be looked at" * 9)
    with pytest.raises(LedgerError, match="the file is damaged"):
        SqliteLedger(tmp_path, mode="open")


HOLDER = """
import sys
from tidemill.ledger import SqliteLedger
ledger = SqliteLedger(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"is being written by process {holder.pid}; wait until it has ended"):
            SqliteLedger(tmp_path, mode="open")
    finally:
        holder.kill()  # death gives the lock back
        holder.communicate(timeout=10)
    with SqliteLedger(tmp_path, mode="open"):
        with pytest.raises(RunFolderError, match="by this process"):
            SqliteLedger(tmp_path, mode="open")
        second = subprocess.run(
            [sys.executable, "-c", HOLDER, tmp_path], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
        assert second.returncode != 0 and "is being written by process" in second.stderr  # the refusal did not free it
    SqliteLedger(tmp_path, mode="open").close()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path) as ledger:
        fill(ledger, range(3))
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerError, match=r"the disk is full .* free some space and start the same command again"):
            for i in range(3, 200):
                ledger.admit(i, task(i))
            ledger.event("begun", {})
        ledger._db.execute("PRAGMA max_page_count = 100000")
        fill(ledger, (200,))
        assert ledger.counts().admitted == 201 and ledger.counts().conserved and ledger.verify() == []


def test_admissions_are_recorded_with_the_next_call(tmp_path: Path) -> None:
    """Also when that call failed at first."""
    with SqliteLedger(tmp_path) as ledger:
        ledger.admit(0, task(0))
        ledger.admit(1, task(1))
        outside = raw(ledger)
        assert outside.execute("SELECT count(*) FROM groups").fetchone() == (0,)
        outside.execute("BEGIN IMMEDIATE")  # somebody's sqlite3 session
        ledger._db.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(LedgerError, match="locked"):
            ledger.event("said", {})
        outside.execute("ROLLBACK")
        assert outside.execute("SELECT count(*) FROM groups").fetchone() == (0,)
        ledger.event("said", {})
        assert outside.execute("SELECT count(*) FROM groups").fetchone() == (2,)
        with pytest.raises(LedgerError, match="group 1 was admitted before"):
            ledger.admit(1, task(1))
        ledger.admit(2, task(2))
        assert ledger.next_group_id() == 3  # a read sees them
        ledger.admit(3, task(3))
    with SqliteLedger(tmp_path, mode="open") as ledger:
        assert [p.id for p in ledger.pending()] == [0, 1, 2, 3]
        with pytest.raises(LedgerError, match="group 3 was admitted before"):
            ledger.admit(3, task(3))


def test_rows_summarise_what_was_sampled(tmp_path: Path) -> None:
    """Also where a trajectory between others has no sampled token."""
    made = group(0, samples=3, length=9)
    made.trajectories[1].mask[:] = False
    with SqliteLedger(tmp_path) as ledger:
        ledger.admit(0, made.task)
        ledger.finish(made)
        rows = ledger.samples(order="recent")
    for row, t in zip(rows, made.trajectories, strict=True):
        sampled = t.versions[t.mask]
        assert row.sampled == len(sampled) and row.tokens == len(t.tokens)
        if len(sampled):
            assert (row.oldest, row.newest) == (sampled.min(), sampled.max())
            assert row.mean_logprob == pytest.approx(float(t.logprobs[t.mask].mean()), rel=1e-6)
        else:
            assert (row.oldest, row.newest, row.mean_logprob) == (None, None, None)


LIMITED = """
import resource, signal, sys
from ledger_cases import group, task
from tidemill.ledger import LedgerError, SqliteLedger
ledger = SqliteLedger(sys.argv[1])
for i in range(3):
    ledger.admit(i, task(i))
ledger.finish(group(0))
size = (ledger.folder / "trajectories" / "seg-000001.bin").stat().st_size
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))  # the next record fits by 100 bytes
try:
    ledger.finish(group(1))
except LedgerError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger.finish(group(2))
"""


def test_a_record_torn_by_a_full_disk_is_never_read(tmp_path: Path) -> None:
    run = [sys.executable, "-c", LIMITED, tmp_path]
    result = subprocess.run(run, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent, check=False)
    assert result.returncode == 0, result.stderr
    assert "the disk is full" in result.stdout
    with SqliteLedger(tmp_path, mode="open") as ledger:
        assert [(p.id, p.finished) for p in ledger.pending()] == [(0, True), (1, False), (2, True)]
        assert ledger.verify() == []
        assert_same(ledger.load(0), group(0))
        assert_same(ledger.load(2), group(2))
        ledger.finish(group(1))
        assert_same(ledger.load(1), group(1))


def test_scores_may_carry_parts_and_the_index_has_them(ledger: SqliteLedger) -> None:
    ledger.admit(0, task(0))
    scored = group(0)
    scored.trajectories[0].outcome = Score(0.5, {"format": 1.0, "answer": 0.0})
    ledger.finish(scored)
    assert ledger.has_finished(0)
    query = "SELECT json_extract(parts, '$.format') FROM outcomes WHERE sample = 0"
    assert raw(ledger).execute(query).fetchone() == (1.0,)
