"""Environments from settings: what good input gives, and the one sentence that each kind of bad input gets."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.config import Config, build, dump
from tidemill.core.errors import ConfigError
from tidemill.core.types import Finish, InfraError, Score, Task, Trajectory, Unscorable
from tidemill.envs.build_environment import make_environment, reward_environment
from tidemill.envs.curriculum import task_order
from tidemill.envs.environment import environment
from tidemill.envs.environment_settings import EnvSettings
from tidemill.envs.python_tasks import splits_of
from tidemill.envs.reward_workers.reward_pool import RewardPool


class Recipe(Config):
    env: EnvSettings = "guess"  # type: ignore[assignment]


def make(env, scorer=None):
    return make_environment(build(Recipe, {"env": env}).env, scorer or RewardPool(workers=0))


def attempt(text: str) -> Trajectory:
    """As rolled out: one prompt token, then the text's characters."""
    tokens = np.array([0, *map(ord, text)], np.int32)
    mask = np.arange(len(tokens)) > 0
    return Trajectory(tokens, mask, np.where(mask, -1, 0).astype(np.float32), np.where(mask, 0, -1), Finish.STOP, text=text)


def write(path: Path, rows: list) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


ROWS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i % 3} for i in range(40)]


async def test_rows_with_a_named_reward(tmp_path):
    data = write(tmp_path / "sums.jsonl", ROWS)
    env = make(
        {"kind": "rows", "data": data, "reward": "numeric", "reward_options": {"tolerance": 0.1}, "template": "Q: {prompt}"}
    )
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) + len(held_out) == 40
    assert 0 < len(held_out) < 15
    assert not {t.prompt for t in train} & {t.prompt for t in held_out}
    task = train[0]
    assert task.prompt.startswith("Q: ")
    assert set(task.data) == {"answer", "level"}
    gold = task.data["answer"]
    assert await env.judge(task, [attempt(f"it is {gold}.05"), attempt("0.5")]) == [Score(1.0), Score(0.0)]
    write(tmp_path / "sums.jsonl", [*ROWS[5:], {"prompt": "new", "answer": "1", "level": 0}, *ROWS[:5]])
    again = make({"kind": "rows", "data": data, "reward": "numeric", "template": "Q: {prompt}"})
    assert {t.id for t in again.tasks("eval")} >= {t.id for t in held_out}


def test_a_row_that_comes_again_counts_again(tmp_path):
    row = {"prompt": "a", "completion": "b", "label": True}
    data = write(tmp_path / "labels.jsonl", [row, {**row, "label": False}, row, row])
    held_out = write(tmp_path / "eval.jsonl", [{**row, "prompt": "c"}])
    tasks = make({"kind": "rows", "data": data, "eval_data": held_out, "reward": ""}).tasks("train")
    assert [task.data["label"] for task in tasks] == [True, False, True, True]
    assert len({task.id for task in tasks}) == 4
    given = splits_of(lambda split: [row, row] if split == "train" else [{**row, "prompt": "c"}], "given in code")
    assert len({task.id for task in given["train"]}) == 2


def test_tasks_that_cannot_be_made_are_told_with_the_line():
    def made(split):
        return [{"prompt": "a"}][1:] if split == "train" else [{}["x"]]

    line = made.__code__.co_firstlineno + 1
    told = re.escape(f"environment 'mine': its tasks cannot be made for 'eval': KeyError: 'x' (test_make.py:{line})")
    with pytest.raises(ConfigError, match=f"^{told}$"):
        splits_of(made, "mine")


async def test_rows_of_two_files_with_their_own_columns_and_messages(tmp_path):
    def row(i):
        return {"question": [{"role": "user", "content": f"say {i}"}], "solution": f"{i}"}

    data = write(tmp_path / "train.jsonl", [row(i) for i in range(5)])
    held_out = write(tmp_path / "eval.jsonl", [row(i) for i in range(5, 7)])
    env = make(
        {
            "kind": "rows",
            "data": data,
            "eval_data": held_out,
            "prompt_column": "question",
            "answer_column": "solution",
            "reward": "exact",
        }
    )
    assert [len(env.tasks("train")), len(env.tasks("eval"))] == [5, 2]
    task = env.tasks("train")[3]
    assert task.prompt == [{"role": "user", "content": "say 3"}]
    assert await env.judge(task, [attempt("3")]) == [Score(1.0)]


TRL_REWARD = """
calls = []

def reward(completions, answer, level, **kwargs):
    calls.append(len(completions))
    assert set(kwargs) == {"prompts", "completion_ids"}
    assert kwargs["completion_ids"][0] == [ord(c) for c in completions[0]]
    return [None if not c else float(c == a) + len(calls) / 100 for c, a in zip(completions, answer)]

async def waits(completion, answer):
    import asyncio
    if completion == "slow":
        await asyncio.sleep(60)
    if completion == "raise":
        raise TimeoutError("of its own")
    return float(completion == answer)

async def waits_for_all(completions, **kwargs):
    return [float(len(c)) for c in completions]

def blocks(completion):
    import time
    time.sleep(60)
"""


async def test_a_trl_reward_function_works_unchanged_in_one_call_a_group(tmp_path):
    (tmp_path / "mine.py").write_text(TRL_REWARD)
    data = write(tmp_path / "rows.jsonl", ROWS)
    pool = RewardPool(workers=2, limit_s=10)
    try:
        env = make({"kind": "python", "path": f"{tmp_path}/mine.py:reward", "data": data}, pool)
        task = env.tasks("train")[0]
        outcomes = await env.judge(task, [attempt(task.data["answer"]), attempt("no"), attempt("")])
        assert outcomes[:2] == [Score(1.01), Score(0.01)]
        assert isinstance(outcomes[2], Unscorable)
        assert pool.counters()["scoring/calls"] == 1
    finally:
        await pool.close()


async def test_async_rewards_are_awaited_here_under_the_limit(tmp_path):
    (tmp_path / "mine.py").write_text(TRL_REWARD)
    data = write(tmp_path / "rows.jsonl", ROWS)
    pool = RewardPool(workers=1, limit_s=0.2)
    env = make({"kind": "python", "path": f"{tmp_path}/mine.py:waits", "data": data}, pool)
    task = env.tasks("train")[0]
    right, slow, raised = await env.judge(task, [attempt(task.data["answer"]), attempt("slow"), attempt("raise")])
    assert right == Score(1.0)
    assert isinstance(slow, InfraError)
    assert "did not return within 0.2 s" in slow.reason
    assert isinstance(raised, InfraError)
    assert "raised TimeoutError: of its own" in raised.reason
    group = make({"kind": "python", "path": f"{tmp_path}/mine.py:waits_for_all", "data": data}, pool)
    assert await group.judge(task, [attempt("a"), attempt("bc")]) == [Score(1.0), Score(2.0)]
    assert pool.counters()["scoring/starts"] == 0
    await pool.close()


async def test_a_blocking_reward_does_not_block_the_loop(tmp_path):
    (tmp_path / "mine.py").write_text(TRL_REWARD)
    data = write(tmp_path / "rows.jsonl", ROWS)
    pool = RewardPool(workers=2, limit_s=0.3)
    try:
        env = make({"kind": "python", "path": f"{tmp_path}/mine.py:blocks", "data": data}, pool)
        outcomes = await env.judge(env.tasks("train")[0], [attempt("x"), attempt("y")])
        assert all(isinstance(o, InfraError) and "did not return" in o.reason for o in outcomes)
    finally:
        await pool.close()


async def test_a_reward_function_with_tasks_in_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def tasks(split):\n"
        "    start = 0 if split == 'train' else 10\n"
        "    return [{'prompt': f'say {i}', 'answer': str(i)} for i in range(start, start + 10)]\n"
        "def score(completion, answer):\n    return completion == answer\n"
    )
    env = make(f"{tmp_path}/mine.py:score")
    assert env.name == "mine"
    assert [len(env.tasks(split)) for split in ("train", "eval")] == [10, 10]
    assert await env.judge(env.tasks("eval")[0], [attempt("10"), attempt("9")]) == [Score(1.0), Score(0.0)]


async def test_an_environment_from_a_file_on_other_tasks(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tidemill.envs.environment import environment\n"
        "@environment(tasks=[{'prompt': f'say {i}'} for i in range(50)])\n"
        "async def play(task, chat):\n    return float(await chat.reply(task.prompt) == task.data['answer'])\n"
    )
    assert len(make(f"{tmp_path}/mine.py:play").tasks("train")) > 30
    data = write(tmp_path / "rows.jsonl", ROWS)
    env = make({"kind": "python", "path": f"{tmp_path}/mine.py:play", "data": data})
    assert env.tasks("train")[0].data["answer"]

    class Echo:
        async def reply(self, message):
            return str(int(message.split()[0]) + 1)

    assert await env.run(env.tasks("train")[0], Echo()) == Score(1.0)


async def test_one_turn_is_asked_for_as_the_last(tmp_path):
    class Says:
        async def reply(self, message, *, last=False):
            assert last
            return "1"

    env = make({"kind": "rows", "data": write(tmp_path / "rows.jsonl", ROWS), "reward": "exact"})
    assert await env.run(env.tasks("train")[0], Says()) is None
    await env.close()


async def test_an_episode_that_does_not_decide_is_not_a_zero():
    @environment(tasks=[Task("a", "a"), Task("b", "b")])
    async def forgets(task, chat):
        return None

    assert isinstance(await forgets.run(Task("a", "a"), None), Unscorable)


async def test_a_function_of_this_process_as_the_reward():
    async def score(completion, answer):
        return completion == answer

    env = reward_environment(score, ROWS, RewardPool(workers=0))
    task = env.tasks("train")[0]
    assert await env.judge(task, [attempt(task.data["answer"])]) == [Score(1.0)]
    pool = RewardPool(workers=1)
    env = reward_environment(lambda completion, answer: float(completion == answer), ROWS, pool)
    assert await env.judge(task, [attempt(task.data["answer"]), attempt("no")]) == [Score(1.0), Score(0.0)]
    (note,) = env.notes
    assert note.startswith("reward lambda runs in this process") and "Nothing kills it" in note
    assert pool.counters()["scoring/starts"] == 0


def test_short_strings():
    assert dump(build(Recipe, {"env": "guess"}))["env"]["kind"] == "guess"
    assert build(Recipe, {"env": "reasoning_gym:gcd"}).env.dataset == "gcd"
    assert build(Recipe, {"env": "a/my.py:score"}).env.path == "a/my.py:score"
    assert build(Recipe, dump(build(Recipe, {"env": "guess"}))) == build(Recipe, {})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("gues", r"unknown environment 'gues' \(did you mean 'guess'\?\)"),
        ("reasoning_gym", r"'reasoning_gym' needs dataset: expected {kind = \"reasoning_gym\", dataset = ...}"),
        ("rows", "'rows' needs data: expected"),
        ("my.py", "expected my.py:NAME"),
        ({"kind": "row"}, r"unknown kind 'row' \(did you mean 'rows'\?\)"),
        ({"low": 3}, "has no kind"),
        ({"kind": "guess", "hihg": 3}, "unknown key 'env.hihg'; did you mean 'env.high'"),
        ({"kind": "guess", "turns": "many"}, "env.turns = 'many'"),
        (7, "env"),
        ({"kind": "guess", "low": 5, "high": 5}, "expected low < high"),
        ("absent.py:score", "absent.py' does not exist"),
        ({"kind": "rows", "data": "absent.jsonl", "reward": "exact"}, "'absent.jsonl' does not exist"),
        ({"kind": "rows", "data": "EMPTY", "reward": "exact"}, "is empty: expected at least one row"),
        ({"kind": "rows", "data": "BROKEN", "reward": "exact"}, "broken.jsonl', line 2 is not JSON"),
        ({"kind": "rows", "data": "LIST", "reward": "exact"}, "list.jsonl', line 1 is a list: expected one object"),
        (
            {"kind": "rows", "data": "ONE", "reward": "exact"},
            "has 1 rows, and .* none falls on the held-out side of eval_share = 0.1: give eval_data",
        ),
        ({"kind": "rows", "data": "ROWS", "reward_options": {"tolerance": 1}}, "env: reward_options do not apply while"),
        ({"kind": "rows", "data": "ROWS", "reward": "exat"}, "unknown reward 'exat'; did you mean 'exact'"),
        ({"kind": "rows", "data": "ROWS", "reward": "regex"}, "reward 'regex' needs 'pattern'"),
        ({"kind": "rows", "data": "ROWS", "reward": "exact", "reward_options": {"norm": 1}}, "has no option 'norm'"),
        (
            {"kind": "rows", "data": "ROWS", "reward": "exact", "prompt_column": "question"},
            "line 1 has no column 'question'",
        ),
        (
            {"kind": "rows", "data": "ROWS", "reward": "exact", "answer_column": "solution"},
            "line 1 has no column 'solution'",
        ),
        ({"kind": "rows", "data": "ROWS", "reward": "exact", "template": "Q:"}, r"expected \{prompt\} in it"),
        ({"kind": "rows", "data": "ROWS", "eval_data": "ROWS", "reward": "exact"}, "40 tasks are in train and in eval"),
        ({"kind": "rows", "data": "PROMPTS", "reward": "exact"}, r"needs 'answer', which no task has \(columns: level\)"),
        ({"kind": "rows", "data": "NUMBERS", "reward": "exact"}, "prompt 3 is neither a text nor a list"),
        ({"kind": "python", "path": "FILE:nothing"}, "has no 'nothing'"),
        ({"kind": "python", "path": "FILE:number"}, "is a int: expected an environment or a reward function"),
        ({"kind": "python", "path": "FILE:score"}, "is a reward function without tasks: give env.data"),
        ({"kind": "python", "path": "FILE:bare"}, "environment 'bare' has no tasks"),
        ({"kind": "python", "path": "FILE:sync"}, "does not import: ConfigError"),
        ({"kind": "python", "path": "FILE:needs_gold", "data": "ROWS"}, "needs 'gold', which no task has"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, env, message):
    (tmp_path / "mine.py").write_text(
        "from tidemill.envs.environment import environment\nnumber = 3\n"
        "def score(completion): return 1.0\ndef needs_gold(completion, gold): return 1.0\n"
        "@environment\nasync def bare(task, chat): return 1.0\n"
    )
    (tmp_path / "sync.py").write_text(
        "from tidemill.envs.environment import environment\n@environment\ndef play(task, chat): return 1.0\n"
    )
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    names = {
        "EMPTY": write(tmp_path / "empty.jsonl", []),
        "BROKEN": str(tmp_path / "broken.jsonl"),
        "LIST": write(tmp_path / "list.jsonl", [[1]]),
        "ONE": write(tmp_path / "one.jsonl", ROWS[:1]),
        "ROWS": write(tmp_path / "rows.jsonl", ROWS),
        "PROMPTS": write(tmp_path / "prompts.jsonl", [{"prompt": r["prompt"], "level": 1} for r in ROWS]),
        "NUMBERS": write(tmp_path / "numbers.jsonl", [{"prompt": 3}]),
        "FILE:sync": f"{tmp_path}/sync.py:play",
    }
    if isinstance(env, dict):
        files = {k: names.get(v, v) if isinstance(v, str) else v for k, v in env.items()}
        env = {k: v.replace("FILE:", f"{tmp_path}/mine.py:") if isinstance(v, str) else v for k, v in files.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        make(env)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_another_format_needs_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not there: find_spec raises ValueError for None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="need `pip install datasets`"):
        make({"kind": "rows", "data": str(tmp_path / "rows.parquet"), "reward": "exact"})
    with pytest.raises(ConfigError, match="and is no file here"):
        make({"kind": "rows", "data": "someone/something", "reward": "exact"})
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[gym\]'"):
        make("reasoning_gym:gcd")


def test_every_epoch_holds_each_task_once_in_another_order():
    epochs = [[task_order(50, 3, epoch * 50 + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [task_order(50, 4, i) for i in range(50)]
    assert task_order(50, 3, 74) == epochs[1][24]  # whatever was asked before
    assert [task_order(5, 0, i) for i in range(5)] == [0, 4, 3, 2, 1]  # a resume in a later release goes on in this order
    with pytest.raises(ValueError, match="position >= 0"):
        task_order(5, 0, -1)


def test_settings_load_nothing_heavy():
    import subprocess

    code = "import sys, tidemill.envs.environment_settings; "
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
