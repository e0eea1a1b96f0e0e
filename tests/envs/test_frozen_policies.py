"""A frozen policy is asked in a conversation of its own: nothing of it is recorded, and no other version may answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import asking_environments
import numpy as np
import pytest
from scripted_engine import chat_tokenizer

from tidemill.controller.rollout import EpisodeSetup, greedy
from tidemill.core.errors import ContextFull, EpisodeOver, PolicyMismatch
from tidemill.core.types import Completion, Finish, GenerateRequest, InfraError, SamplingParams, Score, Task, Version
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.envs.environment_settings import EnvironmentWorkers
from tidemill.envs.episode_workers import WorkerEnvironment
from tidemill.models.conversations import prompt_tokens
from tidemill.run.preflight.reward_audit import check

TOKENIZER = chat_tokenizer()
JUDGE = Version(0, policy="judge", fingerprint="of its folder")
FILE = str(Path(__file__).with_name("asking_environments.py"))
REPLIES = {"solver": "hello", "judge": "yes"}


class Engine:
    """Answers for each policy with one text, as the version that it serves of it."""

    def __init__(self, **versions: Version) -> None:
        self.serves = {"solver": Version(3, policy="solver", fingerprint="s"), "judge": JUDGE} | versions
        self.asked: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.finish = Finish.STOP

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0)
        self.asked.append(request)
        if request.policy not in self.serves:
            raise ValueError(f"policy {request.policy!r} is not served here")
        version, text = self.serves[request.policy], REPLIES[request.policy]
        ids = np.array([*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], np.int32)
        logprobs, steps = np.full(len(ids), -0.5, np.float32), np.full(len(ids), version.step, np.int32)
        return Completion(ids, logprobs, steps, (version,), self.finish)

    async def abort(self, key: str) -> None:
        self.aborted.append(key)

    def of(self, policy: str) -> list[GenerateRequest]:
        return [request for request in self.asked if request.policy == policy]


def chat_with(engine: Engine, *, context: int = 1000, frozen: dict[str, Version] | None = None) -> EpisodeChat:
    params = SamplingParams(temperature=0.7, max_tokens=30, stop_ids=(TOKENIZER.eos_token_id,))
    how: dict[str, Any] = {"context": context, "key": "g7/0", "seeds": rollout_seeds(1, 7, 0), "policy": "solver"}
    served = {"judge": JUDGE} if frozen is None else frozen
    return EpisodeChat(cast(Any, engine), TOKENIZER, params, **how, frozen=served)


async def test_a_frozen_policy_is_asked_as_the_episode_samples_and_nothing_is_recorded() -> None:
    engine, silent = Engine(), Engine()
    chat, alone = chat_with(engine), chat_with(silent)
    assert await chat.reply("hello there") == "hello" == await alone.reply("hello there")
    assert await chat.ask("judge", "is it right?") == "yes"
    assert await chat.ask("judge", "is it right?", max_tokens=4) == "yes"
    assert await chat.reply("and now?") == await alone.reply("and now?")
    asked = engine.of("judge")
    np.testing.assert_array_equal(asked[0].tokens, prompt_tokens(TOKENIZER, "is it right?"))
    assert [request.params.max_tokens for request in asked] == [30, 4]
    assert {(request.key, request.params.temperature, request.extras) for request in asked} == {("g7/0", 0.7, ())}
    seeds = [request.params.seed for request in engine.asked]
    assert len(set(seeds)) == len(seeds), "each reply has a seed of its own"
    recorded, expected = chat.rows()[-1], alone.rows()[-1]
    np.testing.assert_array_equal(recorded.tokens, expected.tokens)
    assert recorded.sources == expected.sources == (engine.serves["solver"],) and recorded.said == expected.said
    assert recorded.turns == 2 and recorded.policy == "solver"
    again = Engine()
    other = chat_with(again)
    await other.reply("hello there")
    await other.ask("judge", "is it right?")
    assert again.of("judge")[0].params.seed == asked[0].params.seed, "the same episode asks with the same seeds"


@pytest.mark.parametrize(
    "stranger",
    [
        Version(0, policy="judge", fingerprint="another"),
        Version(1, policy="judge", fingerprint="of its folder"),
        Version(0, policy="solver", fingerprint="of its folder"),
    ],
)
async def test_another_version_that_answers_ends_the_run(stranger: Version) -> None:
    chat = chat_with(Engine(judge=stranger))
    await chat.reply("hello there")
    with pytest.raises(PolicyMismatch, match=r"judge@v0 \(fingerprint of its folder\) was asked, and .* answered"):
        await chat.ask("judge", "is it right?")
    assert isinstance(chat.failure, PolicyMismatch)


async def test_a_reply_of_another_policy_ends_the_run() -> None:
    chat = chat_with(Engine(solver=Version(3, policy="adder", fingerprint="a")))
    with pytest.raises(PolicyMismatch, match="policy 'solver' was asked, and adder@v3"):
        await chat.reply("hello there")
    assert isinstance(chat.failure, PolicyMismatch)


@pytest.mark.parametrize(
    ("policy", "frozen", "sentence"),
    [
        ("nobody", None, r"chat.ask\('nobody'\): 'nobody' is no frozen policy of this run; it serves 'judge'"),
        ("adder", None, r"'adder' is no frozen policy of this run"),
        ("solver", None, r"'solver' is the one that plays, and chat.reply asks it"),
        ("judge", {}, r"'judge' is no frozen policy of this run; it serves none"),
        (7, None, r"chat.ask\(7\): 7 is no frozen policy"),
    ],
)
async def test_who_cannot_be_asked_is_told_in_words(policy: Any, frozen: dict[str, Version] | None, sentence: str) -> None:
    engine = Engine()
    chat = chat_with(engine, frozen=frozen)
    with pytest.raises(ValueError, match=sentence):
        await chat.ask(policy, "is it right?")
    assert chat.failure is None and not engine.asked
    assert await chat.reply("hello there") == "hello", "the episode may go on"


async def test_what_fits_no_reply_or_is_no_message_is_told_in_words() -> None:
    chat = chat_with(Engine(), context=40)
    for message in ("hello " * 30, "hello " * 30_000):  # the latter is not even encoded
        with pytest.raises(ValueError, match="the message to 'judge'"):
            await chat.ask("judge", message)
    with pytest.raises(ValueError, match="expected a text"):
        await chat.ask("judge", cast(Any, [{"role": "user"}]))
    with pytest.raises(ValueError, match="max_tokens=0"):
        await chat.ask("judge", "hello", max_tokens=0)
    assert chat.failure is None


async def test_a_full_conversation_can_still_be_judged_and_a_cancelled_one_cannot() -> None:
    engine = Engine()
    chat = chat_with(engine, context=60)
    await chat.reply("hello there")
    with pytest.raises(ContextFull):
        await chat.reply("hello " * 40)
    assert await chat.ask("judge", "is it right?") == "yes"
    engine.finish = Finish.CANCELLED
    with pytest.raises(EpisodeOver, match="cancelled"):
        await chat.ask("judge", "is it right?")
    asked = len(engine.asked)
    with pytest.raises(EpisodeOver):
        await chat.ask("judge", "is it right?")
    assert len(engine.asked) == asked and chat.rows()[-1].finish is Finish.CANCELLED


def setup(environment: Any, **more: Any) -> EpisodeSetup:
    params = SamplingParams(temperature=0.7, max_tokens=20, stop_ids=(TOKENIZER.eos_token_id,))
    return EpisodeSetup(environment, TOKENIZER, params, 1000, 60.0, policies={"": "solver"}, frozen={"judge": JUDGE}, **more)


async def play(environment: Any, do: str, engine: Engine | None = None, episodes: EpisodeSetup | None = None) -> Any:
    task = Task(do, "hello there", {"do": do})
    episodes = episodes or setup(environment)
    return (await episodes.play(task, cast(Any, engine or Engine()), f"key-{do}", rollout_seeds(1, 2, 3)))[-1]


async def test_the_policy_of_an_environment_plays_its_tasks() -> None:
    episodes, engine = setup(asking_environments.asking), Engine(adder=Version(4, policy="adder", fingerprint="a"))
    REPLIES["adder"] = "seven"
    several = EpisodeSetup(
        *(episodes.environment, TOKENIZER, episodes.params, 1000, 60.0),
        policies={"words": "solver", "sums": "adder"},
        frozen={"judge": JUDGE},
    )
    for env, policy in (("words", "solver"), ("sums", "adder")):
        task = Task("t", "hello there", env=env)
        (played,) = await several.play(task, cast(Any, engine), "k", rollout_seeds(1, 2, 3))
        assert played.policy == policy and played.outcome == Score(1.0)
    await greedy(several).play(Task("t", "hello there", env="sums"), cast(Any, engine), "k", rollout_seeds(1, 2, 3))
    assert engine.of("judge")[-1].params.temperature == 0, "an evaluation asks greedily, too"


@asynccontextmanager
async def workers():
    reasons = list[str]()
    settings = EnvironmentWorkers(workers=1)
    env = WorkerEnvironment(
        asking_environments.asking, f"{FILE}:asking", settings, lambda reason: reasons.append(reason) or 0.0
    )
    try:
        yield env
    finally:
        await env.close()
        assert not reasons


@pytest.mark.runs
async def test_from_a_worker_it_is_the_same() -> None:
    async with workers() as env:
        for do in ("judge", "twice", "caught", "adder"):
            here, there = Engine(), Engine()
            expected, found = await play(asking_environments.asking, do, here), await play(env, do, there)
            assert found.outcome == expected.outcome and found.tokens.tobytes() == expected.tokens.tobytes()
            assert [request.policy for request in there.asked] == [request.policy for request in here.asked]
            assert [request.params for request in there.asked] == [request.params for request in here.asked]
        assert isinstance((await play(env, "adder")).outcome, InfraError)
        with pytest.raises(PolicyMismatch, match="was asked"):
            await play(env, "judge", Engine(judge=Version(1, policy="judge")))
        assert (await play(env, "judge")).outcome == Score(1.0), "the worker goes on"


async def test_a_reward_that_asks_is_not_checked_before_a_run() -> None:
    environment = asking_environments.asking
    found = await check(environment, environment.tasks("train")[:3], limit_s=30, budget_s=5, frozen=["judge"])
    (line,) = found.lines
    assert line.verdict == "not checked" and "ask the policy 'judge', which nothing serves before a run" in line.why
    assert not found.refused()
