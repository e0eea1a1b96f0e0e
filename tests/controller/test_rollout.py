"""An episode's failures: the environment's are an InfraError of that attempt, the engine's end the run."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from tidemill.controller.engine_pool import ContextShrank, EnginePool, Member
from tidemill.controller.rollout import EpisodeSetup, Rollout, all_of
from tidemill.core.errors import PeerLost
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import GREEDY, Completion, Finish, InfraError, SamplingParams, Score, Task, Version
from tidemill.models.tokenizer import character_tokenizer

TASK = Task("t", "ab")


class FakeEngine:
    """Answers with one token, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.aborted: list[str] = []

    async def generate(self, request) -> Completion:
        if self.error is not None:
            raise self.error
        one = np.ones(1, np.int32)
        return Completion(one * 3, -0.5 * np.ones(1, np.float32), one, (Version(1),), Finish.STOP)

    async def abort(self, key: str) -> None:
        self.aborted.append(key)


def pool_of(engine) -> EnginePool:
    return EnginePool([Member("engine-0", engine, Capabilities(1000))])


class FakeEnvironment:
    name = "fake"

    def __init__(self, run, judge=None) -> None:
        self.run, self.judge = run, judge


async def ask(task, chat):
    await chat.reply(task.prompt)


async def roll(environment, engine=None):
    episodes = EpisodeSetup(environment, character_tokenizer("ab\n"), SamplingParams(max_tokens=1), context=16, limit_s=0.05)
    pool = pool_of(engine or FakeEngine())
    return [t.outcome for t in (await Rollout(pool, episodes, 2, 0).rollout(0, TASK)).trajectories]


async def test_a_score_is_a_score():
    async def judge(task, attempts):
        return [Score(1.0), Score(0.0)]

    assert await roll(FakeEnvironment(ask, judge)) == [Score(1.0), Score(0.0)]


async def test_a_score_may_reward_the_replies_of_every_row():
    async def two_rows(task, chat):
        for _ in range(2):
            await chat.complete(task.prompt)
        return Score(1.0, turns=(0.5, 0.25))

    async def three_rewards(task, chat):
        await two_rows(task, chat)
        return Score(1.0, turns=(0.5, 0.25, 0.125))

    assert (await roll(FakeEnvironment(two_rows)))[1::2] == [Score(1.0, turns=(0.5, 0.25))] * 2
    assert all(isinstance(each, InfraError) for each in (await roll(FakeEnvironment(three_rewards)))[1::2])


async def test_a_baseline_is_one_greedy_attempt_more():
    asked = []

    class Listening(FakeEngine):
        async def generate(self, request) -> Completion:
            asked.append((request.key, request.params.temperature))
            return await super().generate(request)

    async def judge(task, attempts):
        return [Score(float(i)) for i in range(len(attempts))]

    params = SamplingParams(max_tokens=1, temperature=0.7)
    episodes = EpisodeSetup(FakeEnvironment(ask, judge), character_tokenizer("ab\n"), params, context=16, limit_s=1.0)
    group = await Rollout(pool_of(Listening()), episodes, 2, 0, baseline=True).rollout(4, TASK)
    assert asked == [("g4/0", 0.7), ("g4/1", 0.7), ("g4/-1", 0.0)]
    assert [(t.sample, t.temperature, t.reward) for t in group.trajectories] == [(0, 0.7, 0), (1, 0.7, 1), (GREEDY, 0, 2)]


async def test_what_the_environment_raises_is_its_attempts_affair():
    async def run(task, chat):
        await chat.reply(task.prompt)
        raise KeyError("gold")

    line = run.__code__.co_firstlineno + 2
    assert await roll(FakeEnvironment(run)) == [InfraError(f"KeyError: 'gold' (test_rollout.py:{line})")] * 2


async def test_an_environments_own_timeout_is_not_ours():
    async def run(task, chat):
        await chat.reply(task.prompt)
        raise TimeoutError("the socket")

    line = run.__code__.co_firstlineno + 2
    assert await roll(FakeEnvironment(run)) == [InfraError(f"TimeoutError: the socket (test_rollout.py:{line})")] * 2


async def test_an_episode_that_never_ends_is_aborted():
    engine = FakeEngine()

    async def run(task, chat):
        await chat.reply(task.prompt)
        await asyncio.get_running_loop().create_future()

    assert await roll(FakeEnvironment(run), engine) == [InfraError("the episode took longer than 0.05 s")] * 2
    assert len(engine.aborted) == 2


async def test_an_engines_failure_is_no_outcome_even_when_it_is_swallowed():
    async def run(task, chat):
        try:
            await chat.reply(task.prompt)
        except Exception:
            return Score(0.0)

    with pytest.raises(RuntimeError, match="engine died"):
        await roll(FakeEnvironment(run), FakeEngine(RuntimeError("engine died")))


@pytest.mark.parametrize("kind", ["raises", "miscounts", "hangs"])
async def test_a_judge_that_fails_scores_nothing(kind):
    async def judge(task, attempts):
        if kind == "raises":
            raise ZeroDivisionError("boom")
        if kind == "hangs":
            await asyncio.get_running_loop().create_future()
        return [Score(1.0)]

    expected = {
        "raises": "ZeroDivisionError: boom",
        "miscounts": "1 values: expected a list of 2",
        "hangs": "longer than 0.05 s",
    }[kind]
    outcomes = await roll(FakeEnvironment(ask, judge))
    assert all(isinstance(o, InfraError) and expected in o.reason for o in outcomes)


async def test_a_cancellation_that_comes_while_a_group_is_to_begin_anew_is_heeded():
    """One sibling fails, the others are still ending, and then the run is stopped: the group may not be played again."""
    failed, asked = asyncio.Event(), 0

    async def run(task, chat):
        nonlocal asked
        asked += 1
        if asked == 1:
            failed.set()
            await chat.reply(task.prompt)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):  # it takes its time to end
                await asyncio.sleep(0)

    episodes = EpisodeSetup(
        FakeEnvironment(run), character_tokenizer("ab\n"), SamplingParams(max_tokens=1), context=16, limit_s=60
    )
    pool = pool_of(FakeEngine(ContextShrank()))
    rolling = asyncio.create_task(Rollout(pool, episodes, 2, 0).rollout(0, TASK))
    await failed.wait()
    for _ in range(5):  # the others are being cancelled
        await asyncio.sleep(0)
    rolling.cancel()
    done, _ = await asyncio.wait({rolling}, timeout=5)
    assert done and rolling.cancelled()


async def test_of_several_failures_the_first_is_raised_and_none_is_reported_as_never_retrieved():
    reported: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def fail(name: str) -> None:
        raise PeerLost(name)

    with pytest.raises(PeerLost, match="first"):
        await all_of(fail(name) for name in ("first", "second", "third"))
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []
