"""What a user's coroutines do to whoever awaits them: they end at their limit, and what they return is checked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_rollout import FakeEngine, FakeEnvironment, ask, roll

from tidemill.core import bounded_await as module
from tidemill.core.bounded_await import bounded
from tidemill.core.errors import Overdue
from tidemill.core.types import Finish, InfraError, Score, Task, Trajectory, Unscorable
from tidemill.envs.judge import RewardJudge
from tidemill.envs.reward_workers.reward_pool import RewardPool


async def swallows(*_: object) -> Score:
    """A bare `except:` in a loop: it can not be cancelled."""
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            if stopped:
                raise


stopped = False


@pytest.fixture(autouse=True)
async def nothing_left_behind(monkeypatch):
    global stopped
    stopped = False
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    yield
    stopped = True
    for task in list(module._abandoned):
        task.cancel()
    if module._abandoned:
        await asyncio.wait(module._abandoned, timeout=5)


async def test_an_episode_that_refuses_to_be_cancelled_ends_at_its_limit():
    engine = FakeEngine()
    assert await roll(FakeEnvironment(swallows), engine) == [InfraError("the episode took longer than 0.05 s")] * 2
    assert len(engine.aborted) == 2 and len(module._abandoned) == 2
    assert await roll(FakeEnvironment(ask, swallows)) == [InfraError("judging took longer than 0.05 s")] * 2


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()])
async def test_what_would_end_the_loop_or_the_task_that_waits_is_an_error_of_its_attempt(error):
    async def run(task, chat):
        await chat.reply(task.prompt)
        raise error

    outcomes = await roll(FakeEnvironment(run))
    assert all(isinstance(o, InfraError) and type(error).__name__ in o.reason for o in outcomes)

    async def score(completion):
        raise error

    judge = RewardJudge(score, RewardPool(workers=0))
    one = np.ones(1, np.int32)
    attempt = Trajectory(one, one > 0, np.zeros(1, np.float32), one, Finish.STOP, text="x")
    (outcome,) = await judge(Task("t", "?"), [attempt])
    assert isinstance(outcome, InfraError) and type(error).__name__ in outcome.reason


async def test_a_cancellation_from_outside_is_passed_on():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    task = asyncio.ensure_future(bounded(work(), 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set(), "and it had put things in order before"


async def test_a_limit_and_a_result():
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    assert await bounded(work(0), 60) == "done"
    with pytest.raises(Overdue):
        await bounded(work(60), 0.01)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, Score(0.5)),
        ("1.0", "returned '1.0' (str)"),
        (float("nan"), "returned nan"),
        (Score(1.0, {"format": float("inf")}), "returned a Score whose format is inf"),
        (Score(1.0, {"format": 1}, turns=[1]), Score(1.0, {"format": 1.0}, (1.0,))),  # type: ignore[arg-type]
        (Score(1.0, turns=np.array([0.5])), Score(1.0, turns=(0.5,))),  # type: ignore[arg-type]
        (Score(1.0, turns=np.array(0.5)), Score(1.0, turns=(0.5,))),  # type: ignore[arg-type]
        (Score(1.0, turns=(0.5, 0.5)), "rewards 2 turns of an attempt with 1 reply"),
        (Score(1.0, turns=(0.0,) * 100_000), "rewards 100,000 turns of an attempt with 1 reply"),
        (Score(1.0, turns=[[1.0, 2.0]]), "whose turns[0] is [1.0, 2.0]"),  # type: ignore[list-item]
        (Score(1 + 2j, {"value": 1.0}), "whose value is (1+2j)"),  # type: ignore[arg-type]
        (Score(1.0, {"turns[0]": "x"}, (1.0,)), "whose turns[0] is 'x'"),  # type: ignore[dict-item]
        (Score(1.0, {f"part {i}": 0.0 for i in range(100_000)}), "100,000 parts: expected at most 1,000"),
        (Score(1.0, {"x" * 100_000: 0.0}), "a part named 'xxx"),
        (Score(1.0, {7: 0.0}), "a part named 7"),  # type: ignore[dict-item]
        (Unscorable("x" * 10_000), None),
    ],
)
async def test_what_an_environment_of_ones_own_class_returns(returned, expected):
    async def run(task, chat):
        await chat.reply(task.prompt)
        return returned

    async def judge(task, attempts):
        return [returned] * len(attempts)

    for environment in (FakeEnvironment(run), FakeEnvironment(ask, judge)):
        for outcome in await roll(environment):
            if isinstance(expected, Score):
                assert outcome == expected
            elif expected is None:
                assert isinstance(outcome, Unscorable) and len(outcome.reason) < 400
            else:
                assert isinstance(outcome, InfraError) and expected in outcome.reason and len(outcome.reason) < 800


async def test_turns_are_counted_by_the_replies_of_their_attempt():
    """Fewer turns than replies are rewarded from the first on; the attempt beside one that is refused keeps its score."""
    given = iter([(0.5,), (0.5, 0.25), (0.5,) * 3, ()])

    async def run(task, chat):
        await chat.reply("a")
        await chat.reply("b")
        return Score(1.0, turns=next(given))

    first, second = await roll(FakeEnvironment(run))
    assert (first, second) == (Score(1.0, turns=(0.5,)), Score(1.0, turns=(0.5, 0.25)))
    third, fourth = await roll(FakeEnvironment(run))
    assert fourth == Score(1.0) and isinstance(third, InfraError) and "3 turns of an attempt with 2 replies" in third.reason
