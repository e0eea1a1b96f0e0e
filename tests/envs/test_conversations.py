"""TRL's forms of rows: its own examples of `extract_prompt`, what datasets make of messages, and what is learnt of them."""

from __future__ import annotations

import datetime
import functools
import operator
from typing import Any

import datasets
import pytest

from tidemill.controller.offline_groups import replies
from tidemill.core.errors import ConfigError
from tidemill.core.types import Task
from tidemill.envs.build_environment import reward_environment
from tidemill.envs.python_tasks import splits_of
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.tasks import task_of, with_prompt


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SKY, SUN = user("What color is the sky?"), user("Where is the sun?")
BLUE, GREEN = says("It is blue."), says("It is green.")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # as extract_prompt: the longest common beginning
            {"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
            {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
        ),
        (
            {"chosen": [SKY, BLUE, SUN, says("up")], "rejected": [SKY, BLUE, SUN, says("down")]},
            {"prompt": [SKY, BLUE, SUN], "chosen": [says("up")], "rejected": [says("down")]},
        ),
        ({"chosen": [SKY, BLUE], "rejected": [SKY, BLUE]}, {"prompt": [SKY], "chosen": [BLUE], "rejected": [BLUE]}),
        (
            {"chosen": [SKY, BLUE, SUN, BLUE], "rejected": [SKY, GREEN]},
            {"prompt": [SKY], "chosen": [BLUE, SUN, BLUE], "rejected": [GREEN]},
        ),
        (  # a text beside conversations that hold their prompt, as in UltraFeedback
            {"prompt": "What color is the sky?", "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
            {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
        ),
        (  # an explicit prompt stays
            {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
            {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
        ),
        (
            {"prompt": "sky?", "chosen": [BLUE], "rejected": [GREEN]},
            {"prompt": "sky?", "chosen": [BLUE], "rejected": [GREEN]},
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ({"messages": [SKY, BLUE]}, {"messages": [SKY, BLUE], "prompt": [SKY]}),
        ({"messages": [SKY, BLUE, SUN]}, {"messages": [SKY, BLUE, SUN], "prompt": [SKY, BLUE, SUN]}),
        (  # a table's every row has every key
            {"prompt": [user("a", name=None)], "completion": [{**says("b"), "tool_calls": None}]},
            {"prompt": [user("a")], "completion": [says("b")]},
        ),
        ({"text": [SKY]}, {"text": [SKY]}),
    ],
)
def test_a_row_has_the_prompt_that_it_holds(row, expected):
    assert with_prompt(row, "prompt") == expected


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("answers", {"prompt": [SKY], "completion": [BLUE]}, [([([SKY], "It is blue.")], 1.0)]),
        ("answers", {"messages": [SKY, BLUE, SUN, GREEN]}, [([([SKY], "It is blue."), ([SUN], "It is green.")], 1.0)]),
        (  # what the prompt's assistant says is no reply to learn
            "answers",
            {"prompt": [SKY, BLUE, SUN], "completion": [says("up"), SKY, GREEN]},
            [([([SKY, BLUE, SUN], "up"), ([SKY], "It is green.")], 1.0)],
        ),
        ("answers", {"prompt": "sky?", "completion": [BLUE]}, [([([user("sky?")], "It is blue.")], 1.0)]),
        (
            "pairs",
            {"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
            [([([SKY], "It is blue.")], 1.0), ([([SKY], "It is green.")], 0.0)],
        ),
        ("labels", {"prompt": [SKY], "completion": [GREEN], "label": False}, [([([SKY], "It is green.")], 0.0)]),
    ],
)
def test_what_is_learnt_of_conversational_rows(kind, row, expected):
    assert replies(kind, task_of(row, "row")) == expected


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("answers", {"prompt": [SKY], "completion": [SUN]}, "the last message is the user's"),
        ("answers", {"prompt": [SKY], "completion": [{"content": "b"}]}, "has completion = .* expected messages with role"),
        ("pairs", {"prompt": [SKY], "chosen": [BLUE], "rejected": []}, "has rejected = .*"),
        ("labels", {"prompt": [SKY], "completion": [{**BLUE, "content": None}], "label": True}, "content None"),
    ],
)
def test_a_conversation_without_a_reply_is_named(kind, row, message):
    with pytest.raises(ConfigError, match=message):
        replies(kind, task_of(row, "row"))


ROWS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]


def test_a_dataset_is_a_list_of_its_rows():
    found = splits_of(datasets.Dataset.from_list(ROWS), "e")
    assert found == splits_of(ROWS, "e") and sum(map(len, found.values())) == 40
    tensors = datasets.Dataset.from_list([{**row, "level": 3} for row in ROWS]).with_format("numpy")
    assert type(splits_of(tensors, "e")["train"][0].data["level"]) is int


def test_conversational_rows_survive_the_columns_of_a_dataset():
    rows = [{"prompt": [user(str(i))], "chosen": [says("a")], "rejected": [says("b")]} for i in range(30)]
    rows[3]["prompt"] = [{"role": "system", "content": "s", "name": "n"}, user("3")]
    (task,) = (
        t
        for t in functools.reduce(operator.iadd, splits_of(datasets.Dataset.from_list(rows), "e").values(), [])
        if len(t.prompt) == 2
    )
    assert task.prompt == rows[3]["prompt"] and replies("pairs", task)[0][0] == [(rows[3]["prompt"], "a")]


@pytest.mark.parametrize("name", ["eval", "test", "validation"])
def test_the_splits_of_a_table_are_train_and_held_out(name):
    parts = {"train": datasets.Dataset.from_list(ROWS[:30]), name: datasets.Dataset.from_list(ROWS[30:])}
    for table in (datasets.DatasetDict(parts), {"train": ROWS[:30], name: ROWS[30:]}):
        found = splits_of(table, "e")
        assert [len(found["train"]), len(found["eval"])] == [30, 10] and isinstance(found["eval"][0], Task)


def test_a_function_of_nothing_gives_what_is_divided():
    assert splits_of(lambda: ROWS, "e") == splits_of(ROWS, "e")
    assert (
        splits_of(lambda: {"train": ROWS[:30], "test": ROWS[30:]}, "e")["eval"]
        == splits_of(lambda split: ROWS[30:], "e")["eval"]
    )


def test_a_table_with_a_single_split_is_divided():
    assert splits_of(datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "e") == splits_of(ROWS, "e")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"an IterableDataset, .*: give list\(tasks.take"),
        (datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}), "the splits test: expected train, and one of"),
        ({"train": datasets.Dataset.from_list(ROWS).to_iterable_dataset()}, "an IterableDataset"),
        (
            datasets.Dataset.from_list([{"prompt": "a", "day": datetime.date(2020, 1, 1)}]),
            "task 0 holds a value that is not",
        ),
        (datasets.Dataset.from_list([{"question": "a"}]), "task 0 has no column 'prompt': its columns are question"),
        (7, "tasks are a int: expected a list of tasks or rows, or a Dataset"),
    ],
)
def test_what_is_no_source_of_tasks_is_named(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        splits_of(source, "e")
    assert "\n" not in str(caught.value)


async def test_rewards_of_trls_form_see_conversations_as_trl_gives_them():
    seen = {}

    async def reward(prompts, completions, completion_ids, answer, **kwargs):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, kwargs=kwargs)
        return [1.0] * len(prompts)

    from test_make import attempt

    rows = [{"prompt": [user(row["prompt"])], "answer": row["answer"], "completion": "x", "level": 1} for row in ROWS]
    env = reward_environment(reward, datasets.Dataset.from_list(rows), RewardPool(workers=0))
    task = env.tasks("train")[0]
    await env.judge(task, [attempt("a"), attempt("b")])
    assert seen == {
        "prompts": [task.prompt] * 2,
        "completions": [[says("a")], [says("b")]],
        "ids": [[ord("a")], [ord("b")]],
        "answer": [task.data["answer"]] * 2,
        "kwargs": {"level": [1, 1]},
    }
