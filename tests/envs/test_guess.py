"""The multi-turn example, end to end: tasks, chat, record, outcome."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, says

from tidemill.core.types import Finish, SamplingParams, Score, Task, Unscorable
from tidemill.envs.build_environment import make_environment
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.envs.environment_settings import GuessSettings
from tidemill.envs.guess import ALPHABET
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer(ALPHABET)


def game(**settings):
    return make_environment(GuessSettings(**settings), RewardPool(workers=0))


async def play(env, task: Task, *replies: str, context: int = 999):
    engine = ScriptedEngine(says(TOKENIZER, *replies), context=context)
    params = SamplingParams(stop_ids=(TOKENIZER.eos_token_id,))
    chat = EpisodeChat(engine, TOKENIZER, params, context=context, key="0/0", seeds=rollout_seeds(0, 0, 0))
    outcome = await env.run(task, chat)
    return outcome, chat.rows(outcome)[-1]


async def test_which_reply_is_the_last_is_told():
    told = []

    class Says:
        async def reply(self, message, *, max_tokens=None, last=False):
            told.append(last)
            return "1"

    await game(low=1, high=16).run(Task("t", "guess 1-16", {"number": 5, "turns": 3}), Says())
    assert told == [False, False, True]


async def test_an_episode():
    env = game(low=1, high=16, turns=4)
    task = Task("t", "guess 1-16", {"number": 5, "turns": 4})
    outcome, record = await play(env, task, "8", "um", "is it 5")
    assert outcome == Score(0.5, {"found": 1.0, "guesses": 3.0})
    assert TOKENIZER.decode(record.tokens) == "guess 1-16\n8<eos>lower\num<eos>a number\nis it 5<eos>"
    assert TOKENIZER.decode(record.tokens[record.mask]) == "8<eos>um<eos>is it 5<eos>"
    assert (record.turns, record.finish, record.outcome) == (3, Finish.ENV_DONE, outcome)
    np.testing.assert_array_equal(np.unique(record.versions[record.mask]), [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(("replies", "value"), [(["5"], 1.0), (["3", "5"], 0.75), (["1", "2", "3", "4"], 0.0)])
async def test_faster_is_better(replies, value):
    env = game(turns=4)
    outcome, record = await play(env, Task("t", "guess 1-16", {"number": 5, "turns": 4}), *replies)
    assert outcome.value == value
    assert record.turns == len(replies)
    assert ("higher" in TOKENIZER.decode(record.tokens)) == (len(replies) > 1)


async def test_a_game_that_outgrows_the_context_is_unscorable():
    env = game(turns=4)
    outcome, record = await play(env, Task("t", "guess 1-16", {"number": 5, "turns": 4}), "1", "2", "3", context=24)
    assert isinstance(outcome, Unscorable)
    assert record.finish is Finish.CONTEXT
    assert record.turns == 2


def test_tasks_are_the_same_each_time_and_apart():
    env = game(low=1, high=8, size=60, eval_size=20, seed=1)
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert (len(train), len(held_out)) == (60, 20)
    assert not {t.id for t in train} & {t.id for t in held_out}
    assert train == game(low=1, high=8, size=60, eval_size=20, seed=1).tasks("train")
    assert train != game(low=1, high=8, size=60, eval_size=20, seed=2).tasks("train")
    for task in (*train, *held_out):
        low, high = map(int, task.prompt.removeprefix("guess ").split("-"))
        assert 1 <= low <= task.data["number"] <= high <= 8
        assert set(task.prompt) <= set(ALPHABET)


def test_the_smallest_game_has_both_splits():
    env = game(low=1, high=2)
    assert [len(env.tasks(split)) for split in ("train", "eval")] == [1, 1]
