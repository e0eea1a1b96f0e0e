"""Several environments in one run: what a recipe may say, who is asked about which task, and what is held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tidemill.core.config import build, dump
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Checkable, Environment
from tidemill.core.types import Outcome, Score, Task, Unscorable
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_mixture import Several, parts_of
from tidemill.envs.environment_settings import EnvironmentWorkers
from tidemill.envs.episode_workers import in_workers
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig


class Part:
    """An environment that says who was asked."""

    grouped = False

    def __init__(self, name: str, train: int = 4, held_out: int = 3, broken: bool = False) -> None:
        self.name, self.asked, self._sizes, self._broken = name, list[str](), {"train": train, "eval": held_out}, broken

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{i}", "?") for i in range(self._sizes[split])]

    async def run(self, task: Task, chat: Any) -> Outcome | None:
        self.asked.append(f"run {task.id}")
        return Score(1.0)

    async def judge(self, task: Task, attempts: list[Any]) -> list[Outcome]:
        self.asked.append(f"judge {task.id}")
        return [Score(0.5)] * len(attempts)

    def gold(self, task: Task) -> str:
        return f"{self.name}: {task.id}"

    async def close(self) -> None:
        self.asked.append("closed")
        if self._broken:
            raise OSError("its files are gone")


def several(**parts: Part) -> Several:
    return Several(parts, dict.fromkeys(parts, 1))


async def test_each_task_goes_to_its_own_environment():
    a, b = Part("one"), Part("two")
    env = several(a=a, b=b)
    assert isinstance(env, Environment) and isinstance(env, Checkable) and env.name == "a + b" and not env.grouped
    train = env.tasks("train")
    assert [(t.env, t.id) for t in train] == [(name, f"train-{i}") for name in "ab" for i in range(4)]
    assert await env.run(train[5], None) == Score(1.0) and await env.judge(train[0], [0, 1]) == [Score(0.5)] * 2
    assert (a.asked, b.asked) == (["judge train-0"], ["run train-1"])
    assert env.gold(train[6]) == "two: train-2" and parts_of(env) == [a, b] and parts_of(a) == [a]
    a.grouped = True
    assert env.grouped


async def test_all_are_closed_also_when_one_cannot_be():
    a, b = Part("one", broken=True), Part("two")
    with pytest.raises(OSError, match="its files are gone"):
        await several(a=a, b=b).close()
    assert a.asked == b.asked == ["closed"]


def test_held_out_tasks_are_taken_in_proportion_and_each_once():
    env = Several({"a": Part("a", held_out=60), "b": Part("b", held_out=7)}, {"a": 3, "b": 1})
    held_out = env.tasks("eval")
    assert Counter(t.env for t in held_out[:16]) == {"a": 12, "b": 4}
    assert len({(t.env, t.id) for t in held_out}) == len(held_out) == 67
    assert all(t.env == "a" for t in held_out[40:]), "one has run out"


def test_one_without_gold_says_so():
    class Silent:
        name = "silent"

        def tasks(self, split: str) -> list[Task]:
            return [Task("t", "?")]

    env = Several({"a": Silent(), "b": Part("b")}, {"a": 1, "b": 1})  # type: ignore[dict-item]
    assert env.gold(env.tasks("train")[0]) == Unscorable("environment a does not say what would be right") and env.grouped


GUESS = {"kind": "guess", "low": 1, "high": 9}


def recipe(env: Any, **more: Any) -> RunConfig:
    return build(RunConfig, {"run_dir": "r", "model": "m", "env": env, **more})


def test_a_list_of_tables_makes_them_and_survives_the_round_trip():
    config = recipe([{**GUESS, "name": "a", "weight": 3, "algorithm": "dapo"}, {**GUESS, "high": 5, "name": "b"}])
    assert build(RunConfig, dump(config)) == config
    assert {name: each.name for name, each in config.algorithms.items()} == {"": "grpo", "a": "dapo"}
    env = make_environment(config.env, RewardPool(workers=0))
    assert isinstance(env, Several) and env.weights == {"a": 3, "b": 1}
    assert {t.env for split in ("train", "eval") for t in env.tasks(split)} == {"a", "b"}
    both = recipe([{**GUESS, "name": "a", "algorithm": {"clip_high": 0.3}}, {**GUESS, "name": "b", "algorithm": "dapo"}])
    assert {name: each.name for name, each in both.algorithms.items()} == {"a": "grpo", "b": "dapo"}
    assert both.algorithms["a"].constants["clip_high"] == 0.3
    assert recipe(GUESS).algorithms == {"": recipe(GUESS).algorithm}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ([{**GUESS, "name": "a"}], "a list of 1 environments: expected two or more"),
        ([GUESS, {**GUESS, "name": "b"}], "has the name ''"),
        (["guess", {**GUESS, "name": "b"}], "has the name ''"),
        ([{**GUESS, "name": "a/b"}, {**GUESS, "name": "b"}], "has the name 'a/b': expected letters, digits"),
        ([{**GUESS, "name": "mean"}, {**GUESS, "name": "b"}], "and not mean"),
        ([{**GUESS, "name": "b"}, {**GUESS, "name": "b"}], "two environments have the name 'b'"),
        ([{**GUESS, "name": "a", "weight": 0}, {**GUESS, "name": "b"}], "env.0.weight = 0"),
        ([{**GUESS, "name": "a", "hihg": 0}, {**GUESS, "name": "b"}], "did you mean 'env.0.high'"),
        ([{**GUESS, "name": "a"}, {"kind": "rows", "name": "b", "data": "x"}], "env.reward is empty: expected exact"),
        ([{**GUESS, "name": "a"}, {"kind": "gess", "name": "b"}], "unknown kind 'gess' .did you mean 'guess'"),
        (
            [{**GUESS, "name": "a", "algorithm": "gropo"}, {**GUESS, "name": "b"}],
            "env.0.algorithm: unknown algorithm 'gropo'",
        ),
        ({**GUESS, "weight": 2}, "weight = 2 belongs to one of several environments"),
        ({**GUESS, "name": "a"}, "name = 'a' belongs to one of several environments"),
        ({**GUESS, "algorithm": "dapo"}, "algorithm = 'dapo' belongs to one of several environments"),
    ],
)
def test_what_does_not_fit_is_said(env, said):
    with pytest.raises(ConfigError, match=said):
        recipe(env)


@pytest.mark.parametrize(
    ("own", "common", "said"),
    [
        (
            {"name": "grpo", "old_logprobs": "recompute", "updates": {"epochs": 2}},
            {},
            "environment 'a' takes 2 updates a step",
        ),
        ("remax", {}, "environment 'a' asks for a greedy attempt at each task, or none, unlike the recipe's algorithm"),
        (
            {"name": "grpo", "reference": {"model": "x", "kl": 0.1}},
            {"name": "grpo", "reference": {"kl": 0.1}},
            "environment 'a' asks for another reference policy, unlike the recipe's algorithm",
        ),
        (
            "online_dpo",
            {"updates": {"minibatches": 2}, "old_logprobs": "recompute"},
            "the recipe's algorithm takes 2 updates",
        ),
    ],
)
def test_algorithms_that_cannot_share_a_step_are_refused(own, common, said):
    env = [{**GUESS, "name": "a", "algorithm": own}, {**GUESS, "name": "b"}]
    with pytest.raises(ConfigError, match=said):
        recipe(env, algorithm=common)


def test_an_algorithm_that_no_environment_is_left_for_is_refused():
    env = [{**GUESS, "name": name, "algorithm": "dapo"} for name in "ab"]
    with pytest.raises(ConfigError, match="algorithm = 'aipo' applies to no group: every environment has its own"):
        recipe(env, algorithm="aipo")
    assert set(recipe(env).algorithms) == {"a", "b"}


def test_references_that_are_the_same_policy_go_together():
    own = {"name": "grpo", "reference": {"kl": 0.2, "into": "reward"}}
    config = recipe([{**GUESS, "name": "a", "algorithm": own}, {**GUESS, "name": "b"}], algorithm="online_dpo")
    assert config.reference is not None and config.reference.model == "initial" and plan_of(config).updates == 1


@pytest.mark.parametrize("data", [{"order": "frontier"}, {"retire": 0.9}, {"order": "mixed"}])
def test_an_order_that_follows_from_what_came_back_is_not_deterministic(data):
    with pytest.raises(ConfigError, match="chooses by what has come back"):
        recipe("guess", deterministic=True, data=data)
    assert recipe("guess", data=data).data.order == data.get("order", "shuffled")


def test_easy_first_without_retirement_never_gets_to_what_is_hard():
    with pytest.raises(ConfigError, match=r"would give what is solved for ever: set data\.retire"):
        recipe("guess", data={"order": "easy_first"})


def test_each_environment_plays_where_it_would_alone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tidemill import Score, environment\n\n"
        "@environment(tasks=lambda split: [{'prompt': split}])\nasync def play(task, chat):\n    return Score(1.0)\n"
    )
    config = recipe([{**GUESS, "name": "a"}, {"kind": "python", "path": f"{tmp_path}/mine.py:play", "name": "b"}])
    env = make_environment(config.env, RewardPool(workers=0))
    placed = in_workers(env, EnvironmentWorkers(), lambda reason: 0.0, lambda text: None, config.env)
    assert isinstance(placed, Several) and placed.weights == {"a": 1, "b": 1}
    assert [type(part).__name__ for part in placed.parts.values()] == ["FunctionEnvironment", "WorkerEnvironment"]
