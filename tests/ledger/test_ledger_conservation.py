"""Conservation under random histories: the ledger against a model in plain Python, with restarts and replays."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_cases import assert_same, group, task

from tidemill.core.errors import LedgerError
from tidemill.ledger import SqliteLedger


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="ledger-")
        self.ledger = SqliteLedger(self.folder, durability="process", segment_bytes=2_000)
        self.flying: list[int] = []
        self.ready: list[int] = []
        self.dropped: dict[str, list[int]] = {}
        self.steps: list[tuple[int, list[int]]] = []  # (live incarnation, ids) of step 0, 1, ...
        self.gone: set[int] = set()
        self.life = 0  # the incarnation that steps are begun as

    @property
    def admitted(self) -> int:
        return len(self.flying) + len(self.ready) + sum(map(len, self.dropped.values())) + sum(len(i) for _, i in self.steps)

    @rule()
    def admit(self) -> None:
        assert self.ledger.next_group_id() == self.admitted
        self.flying.append(self.admitted)
        self.ledger.admit(self.flying[-1], task(self.flying[-1]))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.flying))
        self.ledger.finish(group(group_id))
        self.flying.remove(group_id)
        self.ready.append(group_id)

    @precondition(lambda self: self.flying or self.ready)
    @rule(data=st.data(), reason=st.sampled_from(["zero_variance", "infra_error"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        group_id = data.draw(st.sampled_from(self.flying + self.ready))
        self.ledger.drop(group_id, reason)
        (self.flying if group_id in self.flying else self.ready).remove(group_id)
        self.dropped.setdefault(reason, []).append(group_id)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.ready), unique=True, min_size=1, max_size=3))
        self.ledger.begin_step(len(self.steps), self.life, ids)
        self.steps.append((self.life, ids))
        self.ready = [g for g in self.ready if g not in ids]

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), fresh=st.booleans())
    def resume(self, data: st.DataObject, fresh: bool) -> None:
        """A kill: the steps after some checkpoint are replayed, as they were or as a new incarnation."""
        first = data.draw(st.integers(0, len(self.steps)))
        incarnation = max(i for i, _ in self.steps) + fresh
        self.ledger.close()
        self.ledger = SqliteLedger(self.folder, mode="open", durability="process", segment_bytes=2_000)
        for step in range(first, len(self.steps)):
            live, ids = self.steps[step]
            target = incarnation if fresh else live
            assert self.ledger.replay_step(step, target) == (ids, [])
            self.steps[step] = (target, ids)
        self.life = max([self.life, *(i for i, _ in self.steps)])

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        """Some groups of steps since a checkpoint cannot be read."""
        first = data.draw(st.integers(0, len(self.steps) - 1))
        trained = [g for _, ids in self.steps[first:] for g in ids]
        unreadable = data.draw(st.lists(st.sampled_from(trained), unique=True, min_size=1))
        waiting = [g for g in self.ready if g // 4 + 1 > first]  # sampled by weights of undone steps, see `ledger_cases`
        undone = self.ledger.undo_steps(first, unreadable)
        assert (undone.first, undone.last, undone.unreadable) == (first, len(self.steps) - 1, len(unreadable))
        self.dropped.setdefault("unreadable", []).extend(unreadable)
        others = [g for g in [*trained, *waiting] if g not in unreadable]
        assert undone.others == len(others)
        if others:
            self.dropped.setdefault("undone", []).extend(others)
        self.ready = [g for g in self.ready if g not in waiting]
        if any(i == self.life for i, _ in self.steps[first:]):
            self.life += 1
        del self.steps[first:]

    @precondition(lambda self: self.steps or self.dropped)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        settled = [g for _, ids in self.steps for g in ids] + [g for ids in self.dropped.values() for g in ids]
        if not settled:
            return
        group_id = data.draw(st.sampled_from(settled))
        with pytest.raises(LedgerError):
            self.ledger.drop(group_id, "again")
        with pytest.raises(LedgerError):
            self.ledger.begin_step(len(self.steps), 9, [*self.ready, group_id])

    @rule(data=st.data(), max_bytes=st.sampled_from([0, 4_000]))
    def retain(self, data: st.DataObject, max_bytes: int) -> None:
        checkpoint = data.draw(st.integers(0, len(self.steps)))
        self.ledger.retain(checkpoint=checkpoint, max_bytes=max_bytes)
        rows = self.ledger.samples(order="recent", limit=10_000)
        gone = {r.group_id for r in rows if r.gone}
        assert self.gone <= gone
        needed = {g for _, ids in self.steps[checkpoint:] for g in ids} | set(self.ready)
        assert not (gone - self.gone) & needed
        self.gone = gone

    @invariant()
    def conserved(self) -> None:
        counts = self.ledger.counts()
        trained = [g for _, ids in self.steps for g in ids]
        assert (counts.admitted, counts.trained, counts.lost, counts.trained_twice) == (self.admitted, len(trained), 0, 0)
        assert counts.dropped == {reason: len(ids) for reason, ids in self.dropped.items()}
        assert self.ledger.incarnation() == self.life and self.ledger.next_step() == len(self.steps)
        assert counts.pending == len(self.flying) + len(self.ready) and counts.conserved
        assert [(p.id, p.finished) for p in self.ledger.pending()] == sorted(
            [(g, False) for g in self.flying] + [(g, True) for g in self.ready]
        )

    def teardown(self) -> None:
        finished = {r.group_id for r in self.ledger.samples(order="recent", limit=10_000)}
        assert {*self.ready, *(g for _, ids in self.steps for g in ids)} <= finished
        assert self.ledger.verify() == []
        for group_id in finished - self.gone:
            assert_same(self.ledger.load(group_id), group(group_id))
        self.ledger.close()
        shutil.rmtree(self.folder)


TestConservation = History.TestCase
TestConservation.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a history of thirty calls is readable as it is, and shrinking takes minutes
)
