"""Attempts of an evaluation that have no score: they are told of, and where none ever has one the run ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_attempts_without_a_reply import attempt
from test_rollout import FakeEngine, FakeEnvironment, pool_of

from tidemill.controller.evaluation import SCOUTS, Evaluator, Unscored
from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.errors import RunFailed
from tidemill.core.types import UNANSWERED, Finish, Group, InfraError, SamplingParams, Score, Task, Trajectory, Unscorable
from tidemill.models.tokenizer import character_tokenizer
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


def test_what_cannot_be_scored_before_the_policy_said_anything_is_a_mistake():
    mute = attempt(2, 0, Unscorable("the agent ended with exit status 1"))
    with pytest.raises(
        RunFailed, match=r"none of the 3 attempts .* \(3\): the agent ended with exit status 1\. Mend the agent"
    ):
        accuracy(Rounds([mute] * 3))
    with pytest.raises(RunFailed, match=r"none of the 4 attempts .* \(3\)"):
        accuracy(Rounds([mute, mute, mute, ended(LATE)]))
    assert accuracy(Rounds([mute, mute, mute, ended(NONE)])) == 0.0, "this one may have failed because of its reply"
    assert accuracy(Rounds([mute, mute, mute, ended(Score(0.0))])) == 0.0
    waits = attempt(2, 0, Unscorable("the agent took longer than 5 s"))
    waits.info[UNANSWERED] = 1.0
    assert accuracy(Rounds([waits] * 3)) == 0.0, "the policy may be one that does not end its replies"
    with pytest.raises(RunFailed):
        accuracy(unjudged := Rounds([ended(NONE)] * 3, [mute] * 3))
        accuracy(unjudged)


def evaluator_of(
    run: Callable[[Task, Any], Awaitable[Any]], first: str = WHERE, engine: FakeEngine | None = None
) -> tuple[Evaluator, list[Task], Callable[[], int]]:
    """An evaluator of 500 tasks, and the number of its attempts so far."""
    begun = list[str]()

    async def counted(task: Task, chat: Any) -> Any:
        begun.append(task.id)
        return await run(task, chat)

    tokenizer = character_tokenizer("ab")
    episodes = EpisodeSetup(FakeEnvironment(counted), tokenizer, SamplingParams(), 64, 5.0, 8)
    return (
        Evaluator(pool_of(engine or FakeEngine()), episodes, 7, first=first),
        [Task(f"{i}", "ab") for i in range(500)],
        lambda: len(begun),
    )


async def broken(task: Task, chat: Any) -> Any:
    return Unscorable("no API key")


async def test_the_first_attempts_end_an_evaluation_that_nothing_can_come_of():
    async def slow(task: Task, chat: Any) -> Any:
        if begun() > SCOUTS:
            await asyncio.Event().wait()
        return Unscorable("no API key")

    evaluator, tasks, begun = evaluator_of(slow)
    with pytest.raises(
        RunFailed, match=f"none of the first {SCOUTS} attempts at held-out tasks has a score; .*: no API key"
    ):
        await evaluator(tasks)
    assert begun() < len(tasks)
    evaluator, tasks, begun = evaluator_of(broken, first="")
    assert (await evaluator(tasks))["unscorable"] == begun() == len(tasks), "it has judged something before"


async def test_a_reply_that_does_not_come_may_be_the_policys_doing():
    class Rambling(FakeEngine):
        async def generate(self, request: Any) -> Any:
            await asyncio.Event().wait()

    async def late(task: Task, chat: Any) -> Any:
        asking = asyncio.ensure_future(chat.reply(task.prompt))
        await asyncio.sleep(0)
        asking.cancel()
        return Unscorable("the agent is late")

    evaluator, tasks, begun = evaluator_of(late, engine=Rambling())
    assert (await evaluator(tasks))["unscorable"] == begun() == len(tasks)


async def test_attempts_that_fail_at_the_beginning_of_a_file_do_not_end_an_evaluation():
    async def first_half(task: Task, chat: Any) -> Any:
        if int(task.id) < 250:
            return await broken(task, chat)
        await chat.reply("a")
        return Score(1.0)

    evaluator, tasks, _ = evaluator_of(first_half)
    assert (await evaluator(tasks))["accuracy"] == 0.5


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
