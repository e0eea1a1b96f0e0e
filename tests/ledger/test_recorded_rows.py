"""A ledger of attempts with several rows: rows are stored and read back, and attempts are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from ledger_cases import assert_same, support_of, task, trajectory

from tidemill.cli.commands.pairs import PairCounts, _pair
from tidemill.cli.commands.samples import _reward
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.types import GREEDY, Finish, Group, InfraError, Score, Trajectory
from tidemill.ledger.ledger import SqliteLedger


def rows(group_id: int, sample: int, outcome: Score | InfraError, finish: Finish = Finish.STOP) -> list[Trajectory]:
    """An attempt of two seats, the first of which was branched: three rows."""
    first = replace(trajectory(group_id, 2 * sample + 2), sample=sample, outcome=None, finish=Finish.LENGTH, parent=None)
    later = np.arange(12) >= 8
    branch = replace(
        first,
        mask=first.mask & later,
        logprobs=np.where(later, first.logprobs, np.float32(0)),
        versions=np.where(later, first.versions, np.int32(-1)),
        sources=first.sources[-1:],
        support=None,
        parent=(0, 8),
    )
    begun = {name: getattr(first, name)[:8] for name in ("tokens", "mask", "logprobs", "versions")}
    first = replace(first, **begun, sources=first.sources[:1], support=support_of(4))
    other = replace(trajectory(group_id, 2 * sample + 3), sample=sample, seat=1, outcome=outcome, finish=finish, parent=None)
    return [first, branch, other]


def test_attempts_are_counted_and_rows_come_back(tmp_path: Path) -> None:
    ends = {0: Score(1.0), 1: Score(0.25, {"format": 1.0}), 2: InfraError("lost"), GREEDY: Score(0.5)}
    recorded = Group(0, task(0), [row for sample, outcome in ends.items() for row in rows(0, sample, outcome)])
    alike = Group(1, task(1), [row for sample in (0, 1) for row in rows(1, sample, Score(0.0), Finish.LENGTH)])
    with SqliteLedger(tmp_path) as ledger:
        for group in (recorded, alike):
            check_attempts(group)
            ledger.admit(group.id, group.task)
            ledger.finish(group)
        ledger.begin_step(0, 0, [0, 1])
        ledger.end_step(0, 0, {})
        assert_same(ledger.load(0), recorded)
        check_attempts(ledger.load(0))
        found = {group_id: rewards for group_id, _, _, rewards in ledger.history()}
        np.testing.assert_array_equal(found[0], [1.0, 0.25, np.nan])
        assert found[1] == [0.0, 0.0]
        assert [rewards for _, rewards, _ in ledger.experience(0, 1)] == [[1.0, 0.25], [0.0, 0.0]]
        earned = ledger.earned()
        assert (earned.attempts, earned.scored, earned.solved, earned.varied, earned.infra_errors) == (5, 4, 1, 1, 1)
        assert earned.cut == 2, "a row that was cut off, in an attempt that went on, is none"
        every = ledger.samples(order="recent", limit=100)
        assert len(every) == 18 and Counter(row.ends for row in every) == {False: 12, True: 6}
        best = ledger.samples(order="best", limit=100)
        assert [row.reward for row in best] == [1.0, 0.5, 0.25, 0.0, 0.0] and all(row.ends for row in best)
        said = {_reward(row).plain for row in every if row.group_id == 0 and row.sample == 0}
        assert said == {"a row of attempt 0", "reward 1.00"}
        counts = PairCounts()
        assert _pair(ledger, None, [row for row in every if row.group_id == 0 and row.sample != GREEDY], counts) is None  # type: ignore[arg-type]
        assert counts.several_turns == 1
