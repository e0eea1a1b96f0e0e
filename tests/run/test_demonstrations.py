"""A warm-up from demonstrations learns the very tokens that an episode with the same replies records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from envs.scripted_engine import ScriptedEngine, says

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.core.types import SamplingParams, Score, Task
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.models.tokenizer import character_tokenizer
from tidemill.run.sft_warmup import _row, check_answers
from tidemill.run.storage.model_folder import ALPHABET

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator_tools.py"


async def test_a_demonstration_is_what_an_episode_would_record() -> None:
    env, tokenizer = load_object(f"{RECIPE}:calculator"), character_tokenizer(ALPHABET, lowercase=True)
    for task in env.tasks("eval")[:5]:
        said = [each["content"] for each in task.data["demonstration"] if each["role"] == "assistant"]
        engine, params = ScriptedEngine(says(tokenizer, *said)), SamplingParams(stop_ids=(tokenizer.eos_token_id,))
        chat = EpisodeChat(engine, tokenizer, params, context=512, key="k", seeds=rollout_seeds(0, 0, 0))
        outcome = await env.run(task, chat)
        assert isinstance(outcome, Score) and outcome.value == 1.0, "the demonstration does not solve its task"
        (row,) = chat.rows(outcome)
        tokens, learnt = _row(task, tokenizer)
        assert row.tokens.tolist() == tokens.tolist() and row.mask.tolist() == learnt.tolist()
        assert learnt.sum() == sum(len(each) + 1 for each in said)  # each with its end token


def test_no_pair_of_numbers_is_in_both_splits_of_the_recipe() -> None:
    env = load_object(f"{RECIPE}:calculator")
    pairs = {split: {task.prompt.replace("*", "+") for task in env.tasks(split)} for split in ("train", "eval")}
    assert not pairs["train"] & pairs["eval"] and len(pairs["eval"]) > 300


async def test_the_recipe_scores_calls_and_answers() -> None:
    env, tokenizer = load_object(f"{RECIPE}:calculator"), character_tokenizer(ALPHABET, lowercase=True)
    task = env.tasks("train")[0]
    first, answer = (each["content"] for each in task.data["demonstration"] if each["role"] == "assistant")
    for said, score in (
        ([first, answer], 1.0),
        ([first, "0"], 0.5),
        ([answer], 1.0),  # of a model that reckons in its head
        (["add(1, 1)", "2"], 0.0),
        (["add(1, 1)", first, answer], 1.0),
        (["add(1, 1)", "add(1, 1)", first], 0.0),  # the calls of the last reply do not run
        ([answer + "1"], 0.0),
        (["multiply(1", "sorry"], 0.0),
        ([first] * 3, 0.5),
    ):
        engine, params = ScriptedEngine(says(tokenizer, *said)), SamplingParams(stop_ids=(tokenizer.eos_token_id,))
        chat = EpisodeChat(engine, tokenizer, params, context=512, key="k", seeds=rollout_seeds(0, 0, 0))
        outcome = await env.run(task, chat)
        assert isinstance(outcome, Score) and outcome.value == pytest.approx(score), (said, outcome)


NO_END = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]


@pytest.mark.parametrize("demonstration", [None, [], "x", [{"role": "assistant"}], NO_END])
def test_what_is_no_demonstration(demonstration: Any) -> None:
    task = Task("t", "1+1=", {"answer": "2", "demonstration": demonstration})
    with pytest.raises(ConfigError, match="task t: expected as its demonstration a list of messages that ends with the"):
        check_answers([task], character_tokenizer(ALPHABET), 100)
