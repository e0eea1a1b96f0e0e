"""The adapter against the library itself: the same tasks, the same scores, and a held-out split that is held out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reasoning_gym
from test_make import attempt

from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.types import InfraError, Score
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import ReasoningGymSettings
from tidemill.envs.reasoning_gym import GymJudge, _length
from tidemill.envs.reasoning_gym_worker import make
from tidemill.envs.reward_workers.reward_pool import RewardPool


@pytest.fixture(scope="module")
def spelling() -> ReasoningGymSettings:
    args = {"min_word_len": 3, "max_word_len": 5}
    return ReasoningGymSettings(dataset="spell_backward", size=2000, eval_size=1024, seed=5, args=args)


@pytest.fixture(scope="module")
def spell(spelling):
    return make_environment(spelling, RewardPool(workers=0))


def test_train_and_held_out_tasks_are_disjoint_by_question_and_answer(spell):
    train, held_out = spell.tasks("train"), spell.tasks("eval")
    assert (len(train), len(held_out)) == (2000, 1024)
    for key in (lambda t: t.prompt.casefold(), lambda t: t.data["answer"].casefold(), lambda t: t.id):
        assert len({key(t) for t in train} | {key(t) for t in held_out}) == 3024


async def test_scores_are_the_librarys_own(spelling):
    pool = RewardPool(workers=1, limit_s=10)
    try:
        env = make_environment(spelling, pool)
        library = reasoning_gym.create_dataset(spelling.dataset, seed=spelling.seed, size=_length(spelling), **spelling.args)
        seen = set()
        for task in env.tasks("eval")[:20]:
            entry = library[task.data["index"]]
            assert entry["question"] == task.prompt
            gold = entry["answer"]
            texts = [gold, gold.upper(), gold[::-1], gold[:2], "", "x" * 9]
            expected = [library.score_answer(text, entry) for text in texts]
            outcomes = await env.judge(task, [attempt(text) for text in texts])
            assert outcomes == [Score(value) for value in expected]
            seen |= set(expected)
        assert len(seen) > 3
        assert pool.counters()["scoring/calls"] == 20
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_dataset_that_iterates_over_sets_is_the_same_in_every_process():
    settings = ReasoningGymSettings(
        dataset="isomorphic_strings", size=20, eval_size=5, answer_tag="answer", template="? {question}"
    )
    pool = RewardPool(workers=1, limit_s=10)
    try:
        first, again = make_environment(settings, pool), make_environment(settings, pool)
        assert first.tasks("train") == again.tasks("train")
        task = first.tasks("train")[0]
        assert task.prompt.startswith("? ")
        gold = task.data["answer"]
        texts = [f"<answer>no</answer> <answer> {gold} </answer>", f"{gold}"]
        assert await first.judge(task, [attempt(t) for t in texts]) == [Score(1.0), Score(0.0)]
    finally:
        await pool.close()


async def test_one_bad_attempt_does_not_cost_its_siblings_theirs(spelling, spell):
    class Fragile:
        """A scoring stage whose call fails as soon as one attempt is bad."""

        limit_s = 1.0

        async def call_group(self, function, count, *, kwargs, name):
            bad = "bad" in kwargs["completions"]
            return [InfraError("killed") if bad else Score(1.0)] * count

    outcomes = await GymJudge(spelling, Fragile())(
        spell.tasks("train")[0], [attempt("good"), attempt("bad"), attempt("good")]
    )
    assert outcomes == [Score(1.0), InfraError("killed"), Score(1.0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "spell_backwards"}, "no dataset 'spell_backwards'; did you mean 'spell_backward'"),
        ({"dataset": "Spell Backward"}, "did you mean 'spell_backward'?"),
        ({"dataset": "SPELL"}, "did you mean 'spell_backward'?"),
        ({"dataset": "reverse_words"}, "did you mean 'word_sequence_reversal'?"),
        ({"dataset": "sudokus"}, "did you mean 'mini_sudoku' or 'sudoku'?"),
        ({"dataset": "zzqq"}, "no dataset 'zzqq'; known: ab, acre, "),
        ({"dataset": "?"}, "no dataset '?'; known: ab, acre, "),
        ({"dataset": "gcd", "args": {"min_number": 1}}, "gcd has no argument 'min_number'; did you mean 'min_numbers'"),
        ({"dataset": "gcd", "args": {"min_numbers": 9}}, "does not take args="),
        ({"dataset": "coin_flip", "eval_size": 500, "args": {"max_trials": 3}}, "distinct questions with these args"),
        ({"dataset": "coin_flip", "size": 5000}, ""),
    ],
)
def test_what_the_library_does_not_have_is_one_sentence(given, message):
    settings = ReasoningGymSettings(**{"size": 20, "eval_size": 5, **given})
    order = settings.model_dump(include={"dataset", "args", "seed", "size", "eval_size"})
    error = make(**order, length=_length(settings)).get("error", "")
    assert message in error
    assert bool(message) == bool(error)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "spell_backwards"}, "did you mean 'spell_backward'"),
        ({"dataset": "gcd", "args": {"seed": 9}}, "args: seed is not an argument of the dataset: give it as env.seed"),
        ({"dataset": "gcd", "template": "solve"}, r"expected \{question\} in it"),
    ],
)
def test_bad_settings_are_configuration_errors(given, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(build(ReasoningGymSettings, given), RewardPool(workers=0))


async def test_a_question_that_is_not_the_one_that_was_asked_is_never_scored(spell):
    task = spell.tasks("train")[0]
    other = replace(task, data={**task.data, "question": "another"})
    (outcome,) = await spell.judge(other, [attempt(task.data["answer"])])
    assert isinstance(outcome, InfraError)
    assert "made another question" in outcome.reason
