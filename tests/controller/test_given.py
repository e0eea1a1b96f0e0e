"""From a task's columns to a group: which tokens are learnt, that nothing is said to be sampled, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.offline_groups import HeldOut, OfflineRoller, check_offline, replies
from tidemill.core.attempt_checks import check_row
from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.types import Finish, Group, Score, Task
from tidemill.models.conversations import prompt_tokens
from tidemill.models.tokenizer import character_tokenizer
from tidemill.run.recipe import RunConfig

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789|: \n"
PLAIN = character_tokenizer(ALPHABET)
CHAT = character_tokenizer(ALPHABET)
CHAT.chat_template = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def learnt(group: Group, tokenizer=PLAIN) -> list[str]:
    """Of each row the stretches that are learnt, between bars."""
    found = []
    for t in group.trajectories:
        text = [tokenizer.decode([i]) if own else "_" for i, own in zip(t.tokens.tolist(), t.learnt.tolist(), strict=True)]
        found.append("".join(text))
    return found


async def rolled(kind: str, task: Task, tokenizer=PLAIN) -> Group:
    return await OfflineRoller(kind, tokenizer).rollout(7, task)


async def test_nobody_sampled_it_and_the_record_says_so() -> None:
    group = await rolled("pairs", Task("t", "ab", {"chosen": "cd", "rejected": "e"}))
    assert learnt(group) == ["___cd<eos>", "___e<eos>"]
    assert [t.outcome for t in group.trajectories] == [Score(1.0), Score(0.0)] and group.id == 7
    for number, t in enumerate(group.trajectories):
        check_row(t)
        assert not t.mask.any() and (t.versions == -1).all() and not t.logprobs.any() and t.sources == ()
        assert (t.finish, t.sample, t.turns) == (Finish.GIVEN, number, 1)
        np.testing.assert_array_equal(t.tokens[:3], prompt_tokens(PLAIN, "ab"))
    assert group.oldest is None and group.trajectories[0].text == "cd"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"answer": "c"}, "___c<eos>"),
        ({"answer": "c", "completion": "d"}, "___d<eos>"),
        ({"answer": "c", "messages": TALK}, "be brief\nhi\nyo"),
    ],
)
async def test_an_answer_is_the_completion_or_the_conversation_or_the_answer(data: dict[str, Any], expected: str) -> None:
    group = await rolled("answers", Task("t", "ab", data))
    (row,) = learnt(group)
    if "messages" in data:
        assert row == "_" * len("be brief\nhi\n") + "yo<eos>" + "_" * len("bye\n") + "ok<eos>"
        assert group.trajectories[0].turns == 2 and group.trajectories[0].text == "ok"
    else:
        assert row == expected


async def test_of_a_conversation_every_turn_of_the_assistants_is_learnt_as_an_episode_would_send_it() -> None:
    group = await rolled("answers", Task("t", TALK), CHAT)  # the column of the prompt is the conversation
    (t,) = group.trajectories
    text = "system:be brief|user:hi|assistant:yo<eos>|user:bye|assistant:ok<eos>"
    assert CHAT.decode(t.tokens.tolist()) == text
    assert learnt(group, CHAT)[0] == "_" * 34 + "yo<eos>" + "_" * 20 + "ok<eos>"


async def test_labels_are_scores() -> None:
    for label in (True, False):
        group = await rolled("labels", Task("t", "ab", {"completion": "c", "label": label}))
        assert group.trajectories[0].outcome == Score(float(label))


@pytest.mark.parametrize(
    ("kind", "prompt", "data", "message"),
    [
        ("answers", "ab", {"solution": "c"}, r"task t \('ab'\) has the columns solution: expected a column `answer`"),
        ("answers", "ab", {"answer": 3}, "has answer = 3: expected a column `answer` with a text"),
        ("answers", "ab", {"messages": "hi"}, "expected the assistant's"),
        ("answers", "ab", {"messages": [{"role": "user"}]}, "expected messages with role and content"),
        ("answers", "ab", {"messages": TALK[:4]}, "the last message is the user's"),
        ("answers", "ab", {"messages": TALK[2:]}, "message 0 is the assistant's and answers none"),
        ("answers", "ab", {"messages": [*TALK[:2], {"role": "assistant", "content": None}]}, "content None"),
        ("pairs", "ab", {"chosen": "c"}, "has the columns chosen: expected a column `rejected`"),
        ("pairs", "ab", {"chosen": "c", "rejected": None}, "has rejected = None"),
        ("labels", "ab", {"completion": "c"}, "has label = None: expected a column `label`, true or false"),
        ("labels", "ab", {"completion": "c", "label": 1}, "has label = 1"),
        ("labels", "ab", {"label": True}, "expected a column `completion`"),
    ],
)
def test_a_task_that_lacks_what_is_learnt_is_named(kind: str, prompt: str, data: dict[str, Any], message: str) -> None:
    good = {"completion": "c", "chosen": "c", "rejected": "d", "label": True}
    with pytest.raises(ConfigError, match=message):
        check_offline(kind, [Task("first", "ab", good), Task("t", prompt, data)], PLAIN, 64)


def test_a_row_that_has_no_room_is_named_and_the_longest_is_told() -> None:
    fits, long = (
        Task("s", "ab", {"chosen": "c", "rejected": "cdefg"}),
        Task("l", "ab", {"chosen": "c", "rejected": "c" * 30}),
    )
    assert check_offline("pairs", [fits], PLAIN, 9) == 9  # ab, line break, cdefg, end
    with pytest.raises(ConfigError, match=r"the row of task s .* is 9 tokens, and the context holds 8"):
        check_offline("pairs", [fits], PLAIN, 8)
    with pytest.raises(ConfigError, match="task l"):
        check_offline("pairs", [fits, long], PLAIN, 16)
    assert [score for _, score in replies("pairs", fits)] == [1.0, 0.0]


class Forward:
    """A trainer that says the same of every token: -1, and -2 of the reference."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def forward(self, samples, policy="policy"):
        self.asked.append(policy)
        return [np.full(len(s.tokens), -1.0 if policy == "policy" else -2.0, np.float32) for s in samples]


async def test_held_out_figures_come_from_forward_passes_alone() -> None:
    tasks = [Task(f"t{i}", "ab", {"answer": "c", "chosen": "cd", "rejected": "e"}) for i in range(300)]
    found = {}
    for name in ("sft", "dpo"):
        settings, trainer = AlgorithmSettings.preset(name), Forward()
        held_out = HeldOut(trainer, ConfiguredAlgorithm(settings, 8), OfflineRoller(settings.given, PLAIN))  # type: ignore[arg-type]
        found[name] = await held_out(tasks)
        assert trainer.asked == (["policy"] * 2 if name == "sft" else ["policy"] * 3 + ["reference"] * 3)
    assert found["sft"] == {"n": 300, "loss": 1.0}
    margin = 0.1 * (3 - 2)  # a nat above the reference at each token, end tokens included
    assert found["dpo"]["margin"] == pytest.approx(margin) and found["dpo"]["preference_accuracy"] == 1
    assert found["dpo"]["preference_loss"] == pytest.approx(np.log1p(np.exp(-margin)))


RECIPE: dict[str, Any] = {"run_dir": "r", "model": "m", "env": {"kind": "rows", "data": "x.jsonl"}, "algorithm": "dpo"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "grpo"}, "env.reward is empty: expected exact, .*needs none"),
        ({"warmup": {"accuracy": 0.5}}, "warmup.accuracy = 0.5 does not go with given = 'pairs'"),
        ({"rollout": {"group_size": 8}}, "rollout.group_size = 8 does not go with given = 'pairs', where a task holds 2"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature does not apply to given = 'pairs'"),
        ({"rollout": {"top_k": 5}}, "rollout.top_k does not apply"),
        ({"algorithm": {"name": "kto"}, "rollout": {"groups": 1}}, "at least 2 groups"),
    ],
)
def test_settings_of_sampling_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, {**RECIPE, **changes})


def test_a_recipe_knows_how_many_attempts_a_task_holds_and_survives_the_round_trip() -> None:
    from tidemill.core.config import dump

    for algorithm, size in (("dpo", 2), ("sft", 1), ({"name": "kto", "beta": 0.5}, 1)):
        config = build(RunConfig, {**RECIPE, "algorithm": algorithm, "rollout": {"groups": 4}})
        assert config.rollout.group_size == size and not config.judged
        assert build(RunConfig, dump(config)) == config
    assert build(RunConfig, {**RECIPE, "env": {**RECIPE["env"], "reward": "exact"}}).judged
