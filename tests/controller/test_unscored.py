"""Attempts of an evaluation that have no score: they are told of, and where none ever has one the run ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from test_attempts_without_a_reply import attempt

from tidemill.controller.evaluation import Evaluator, Unscored
from tidemill.core.errors import RunFailed
from tidemill.core.types import Finish, Group, InfraError, Score, Task, Trajectory, Unscorable
from tidemill.run.sft_warmup import MOST_TOLD, failures_noted

LATE, NONE = InfraError("the agent is late"), Unscorable("no gold")
WHERE = "held-out tasks"


def ended(outcome: Any, finish: Finish = Finish.ENV_ERROR) -> Trajectory:
    made = attempt(2, 2, outcome)
    made.finish = finish
    return made


def groups(*ends: Trajectory) -> list[Group]:
    return [Group(i, Task(f"t{i}", "?"), [end]) for i, end in enumerate(ends)]


class Rounds(Evaluator):
    """An evaluator whose evaluations have these attempts, one list after another."""

    def __init__(self, *rounds: list[Trajectory], first: str = WHERE) -> None:
        self.told = list[Unscored]()
        episodes: Any = SimpleNamespace()
        self._rounds = iter(rounds)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tidemill.controller.evaluation.greedy", lambda _: episodes)
            patch.setattr("tidemill.controller.evaluation.replace", lambda made, **_: made)
            super().__init__(episodes, episodes, 7, self.told.append, first)

    async def groups(self, tasks: Any) -> list[Group]:
        return groups(*next(self._rounds))


def accuracy(evaluator: Evaluator) -> float:
    return asyncio.run(evaluator([]))["accuracy"]


def test_where_none_has_a_score_the_run_ends_with_the_commonest_reason():
    with pytest.raises(RunFailed) as raised:
        accuracy(Rounds([ended(InfraError("other")), ended(LATE), ended(LATE), ended(LATE)]))
    said = str(raised.value)
    assert said.startswith(
        "none of the 4 attempts at held-out tasks has a score; the commonest reason (3): the agent is late. "
    )
    assert "\n" not in said and "`tidemill reward test RECIPE`" in said and "the logs have any tracebacks" in said


def test_some_that_failed_are_told_of():
    evaluator = Rounds([ended(Score(1.0)), ended(NONE), ended(LATE), ended(LATE)], [ended(Score(1.0))])
    assert accuracy(evaluator) == 0.25 and accuracy(evaluator) == 1.0
    first, second = evaluator.told
    assert (first.attempts, first.reasons, first.commonest) == (4, Counter({LATE.reason: 2, NONE.reason: 1}), LATE.reason)
    assert (second.attempts, second.reasons, second.commonest) == (1, Counter(), "")


def test_a_verifier_that_has_judged_is_disturbed_and_the_run_goes_on():
    failed = [ended(LATE)] * 5
    evaluator = Rounds([ended(Score(0.0)), *failed], failed)
    assert accuracy(evaluator) == accuracy(evaluator) == 0.0
    assert accuracy(Rounds(failed, first="")) == 0.0, "a run that goes on was judged before"


@pytest.mark.parametrize(
    "ends",
    [[ended(LATE)] * 2, [ended(LATE), ended(LATE), ended(LATE, Finish.LENGTH)], [ended(LATE)] * 4 + [ended(NONE)], []],
)
def test_too_few_or_a_model_that_does_not_end_its_replies_are_no_mistake(ends: list[Trajectory]):
    assert accuracy(Rounds(ends)) == 0.0


def test_a_warm_up_says_each_reason_once():
    said = list[str]()
    tell = failures_noted(said.append)
    for _ in range(2):
        tell(Unscored(256, Counter({"late": 3, "no gold": 1})))
    assert said == [
        "warm-up: 3 of 256 attempts have no score and count as not solved: late",
        "warm-up: 1 of 256 attempts have no score and count as not solved: no gold",
    ]
    tell(Unscored(256, Counter(map(str, range(256)))))
    assert len(said) == MOST_TOLD
