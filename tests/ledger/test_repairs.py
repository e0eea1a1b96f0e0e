"""Steps that are undone: however often they ran, every group has one fate afterwards, and the sums hold."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import group, task

from tidemill.ledger import SqliteLedger
from tidemill.ledger.records import Undone


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    waiting=st.integers(0, 5),
    flying=st.integers(0, 2),
    data=st.data(),
)
@pytest.mark.runs
def test_an_undone_step_leaves_every_group_one_fate(
    sizes: list[int], waiting: int, flying: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder, SqliteLedger(folder, durability="process") as ledger:
        finished = sum(sizes) + waiting
        for i in range(finished + flying):
            ledger.admit(i, task(i))
            if i < finished:
                ledger.finish(group(i))
        ids, steps = iter(range(finished)), list[list[int]]()
        for size in sizes:
            steps.append([next(ids) for _ in range(size)])
            ledger.begin_step(len(steps) - 1, 0, steps[-1])
            ledger.end_step(len(steps) - 1, 0, {"reward": 1.0})
            ledger.evaluation(len(steps), {"accuracy": 1.0})
        for life, first in enumerate(data.draw(st.lists(st.integers(0, len(steps) - 1), max_size=2)), 1):
            for step in range(first, len(steps)):
                ledger.replay_step(step, life)
        latest, first = ledger.incarnation(), data.draw(st.integers(0, len(steps) - 1))
        trained = [g for ids in steps[first:] for g in ids]
        unreadable = data.draw(st.sets(st.sampled_from(trained), min_size=1))
        stale = [g for g in ids if g // 4 + 1 > first]  # their newest token, see `ledger_cases`
        others = {*trained, *stale} - unreadable

        undone = ledger.undo_steps(first, unreadable)
        assert undone == Undone(first, len(steps) - 1, len(unreadable), len(others))
        expected = dict.fromkeys(range(finished + flying), None)
        expected |= dict.fromkeys((g for ids in steps[:first] for g in ids), "trained")
        expected |= dict.fromkeys(unreadable, "dropped: unreadable") | dict.fromkeys(others, "dropped: undone")
        assert {g: ledger.fate(g) for g in expected} == expected
        assert ledger.counts().conserved and ledger.next_step() == first and ledger.incarnation() > latest
        assert [record.step for record in ledger.steps()] == list(range(first))
        assert [record.step for record in ledger.evaluations()] == list(range(1, first + 1))

        more = finished + flying
        ledger.admit(more, task(more))
        ledger.finish(group(more))
        ledger.begin_step(first, ledger.incarnation(), [more])
        assert ledger.counts().conserved and ledger.groups_of(first) == [more] and ledger.fate(more) == "trained"
