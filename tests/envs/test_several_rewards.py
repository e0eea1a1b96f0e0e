"""A list of rewards in a recipe's table and from Python: the weighted sum, the parts, and what does not fit."""

from __future__ import annotations

import time

import pytest
from test_make import ROWS, attempt, make, write

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.evaluation import summary
from tidemill.controller.run_monitor import describe
from tidemill.core.config import build
from tidemill.core.errors import ConfigError
from tidemill.core.types import Group, InfraError, Score, Task, Unscorable
from tidemill.envs.build_environment import reward_environment
from tidemill.envs.judge import RewardJudge
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.observability.metrics import StepMetrics
from tidemill.run.recipe import RunConfig

FILES = {
    "a.py": "def right(completion, answer): return float(completion == answer)\n",
    "b.py": (
        "def short(completions, **kwargs): return [None if c == 'skip' else float(len(c) < 3) for c in completions]\n"
        "def right(completion): return 0.5\n"
        "def broken(completion): raise OSError('no sandbox')\n"
        "tasks = [{'prompt': str(i), 'answer': str(i)} for i in range(40)]\n"
        "def gold(answer): return answer\n"
    ),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def judged(env, *texts: str):
    task = next(task for task in env.tasks("train") if len(task.data["answer"]) == 1)
    return await env.judge(task, [attempt(task.data["answer"] if text == "right" else text) for text in texts])


async def test_rows_with_two_rewards(place):
    given = {"kind": "rows", "data": "rows.jsonl", "reward": ["a.py:right", "b.py:short"], "reward_weights": [0.75, 0.25]}
    env = make(given)
    assert await judged(env, "right", "no", "wrong", "skip") == [
        Score(1.0, {"right": 1.0, "short": 1.0}),
        Score(0.25, {"right": 0.0, "short": 1.0}),
        Score(0.0, {"right": 0.0, "short": 0.0}),
        Score(0.0, {"right": 0.0}),
    ]
    assert env.grouped and env.notes == []
    assert isinstance(env.gold(env.tasks("train")[0]), str)  # of the function beside one of them
    assert isinstance(make({**given, "reward": ["a.py:right", "exact"]}).gold(env.tasks("train")[0]), Unscorable)
    (note,) = make({**given, "reward_weights": []}).notes
    assert note.startswith("accuracy counts a weighted sum of 1 or more, which right or short alone may reach")


async def test_named_rewards_with_options_and_a_failure(place):
    given = {
        "kind": "rows",
        "data": "rows.jsonl",
        "reward": ["exact", "regex", "b.py:broken"],
        "reward_options": {"regex": {"pattern": r"(\d+)"}, "exact": {"normalise": True}},
    }
    assert await judged(make({**given, "reward": given["reward"][:2]}), "right") == [
        Score(2.0, {"exact": 1.0, "regex": 1.0})
    ]
    (outcome,) = await judged(make(given), "right")
    assert isinstance(outcome, InfraError) and "raised OSError: no sandbox" in outcome.reason


async def test_functions_of_two_files_with_the_tasks_of_one(place):
    env = make({"kind": "python", "path": ["a.py:right", "b.py:right"]})
    assert await judged(env, "right") == [Score(1.5, {"a.right": 1.0, "b.right": 0.5})]
    assert len(env.tasks("train")) + len(env.tasks("eval")) == 40


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"reward": ["exact", "a.py:absent"]}, "a.py has no 'absent'"),
        ({"reward": ["exact", "exat"]}, "unknown reward 'exat'; did you mean 'exact'"),
        ({"reward": ["exact"], "reward_weights": [1, 2]}, "reward_weights has 2 weights, and reward 1 rewards"),
        ({"reward": "exact", "reward_weights": [1]}, r"reward_weights = \[1.0\] are of a list of rewards"),
        ({"reward": []}, r"env.reward: \[\]: expected a name, or a list of names"),
        ({"reward": ["exact"], "reward_options": {"normalise": True}}, "reward_options.normalise: of several rewards"),
        ({"reward": ["model"]}, "needs reward_options.folder"),
        ({"kind": "python", "path": ["a.py:right"]}, "is a reward function without tasks"),
        ({"kind": "python", "path": ["b.py:right", "b.py:tasks"]}, "'b.py:tasks' is a list: expected a reward function"),
        (["a.py:right", "b.py:short"], "several rewards of one environment are"),
    ],
)
def test_what_does_not_fit_is_one_sentence(place, env, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make({"kind": "rows", "data": "rows.jsonl", **env} if isinstance(env, dict) and "kind" not in env else env)
    assert "\n" not in str(caught.value)


def test_weights_of_gdpo_are_its_own():
    env = {"kind": "rows", "data": "r.jsonl", "reward": ["exact", "numeric"], "reward_weights": [1, 2]}
    with pytest.raises(ConfigError, match="reward_weights does not go with gdpo"):
        build(RunConfig, {"run_dir": "r", "model": "m", "env": env, "algorithm": "gdpo"})
    env = {"kind": "python", "path": "b.py:right", "reward": ["b.py:short"]}
    with pytest.raises(ConfigError, match=r"unknown key 'env.reward'; here it is env = .*, or path = .* where kind"):
        build(RunConfig, {"run_dir": "r", "model": "m", "env": env})


def groups() -> list[Group]:
    outcomes = [Score(1.0, {"f": 1.0, "g": 0.0}), Score(0.5, {"f": 0.5}), Score(0.0, {"f": 0.0, "g": 1.0}), Unscorable("?")]
    group = Group(0, Task("t", "p"), [attempt("abc") for _ in outcomes])
    for number, (each, outcome) in enumerate(zip(group.trajectories, outcomes, strict=True)):
        each.outcome, each.sample = outcome, number
    return [group]


def test_each_reward_is_named_in_the_figures():
    metrics = StepMetrics()
    describe(metrics, groups())
    taken = metrics.take()
    assert (taken["reward/f"], taken["reward/g"], taken["reward/mean"]) == (0.5, 0.5, 0.5)
    figures = summary(groups()[:1])
    assert (figures["reward.f"], figures["reward.g"]) == (0.5, 0.5)


def test_gdpo_gives_an_attempt_that_a_reward_does_not_apply_to_nothing_for_it():
    """As TRL's normalize_then_sum: a mean and a spread over those that have it, and 0 for who has not."""
    found = groups()
    found[0].trajectories.pop()
    settings = AlgorithmSettings.preset("gdpo")
    algorithm = ConfiguredAlgorithm(settings, max_tokens=8)
    samples = algorithm.prepare(found, 0, algorithm.rows(found, 0), {}).samples
    got = [sample.advantages[sample.mask][0] for sample in samples]
    eps = 1e-4
    f = [(value - 0.5) / (0.5 + eps) for value in (1.0, 0.5, 0.0)]
    g = [(value - 0.5) / (0.5**0.5 + eps) for value in (0.0, 1.0)]
    total = [f[0] + g[0], f[1], f[2] + g[1]]
    spread = (sum(value**2 for value in total) / 2) ** 0.5
    assert got == pytest.approx([value / (spread + eps) for value in total], rel=1e-5)


async def test_what_is_alive_runs_here_one_call_after_the_other_under_its_limit():
    calls, inside = [], []

    class Client:
        def __call__(self, completion):
            inside.append(completion)
            time.sleep(0.02)  # for another to come in, if it could
            assert len(inside) == 1, "two at a time"
            calls.append(completion)
            inside.remove(completion)
            if completion == "exit":
                raise SystemExit(3)
            if completion == "end":
                raise StopIteration
            return float(len(completion))

    pool = RewardPool(workers=1)
    judge = RewardJudge(Client(), pool)
    outcomes = await judge(Task("t", "p"), [attempt(text) for text in ("a", "bb", "exit", "end")])
    assert outcomes[:2] == [Score(1.0), Score(2.0)] and sorted(calls) == ["a", "bb", "end", "exit"]
    line = Client.__call__.__code__.co_firstlineno
    assert [outcome.reason for outcome in outcomes[2:]] == [
        f"Client raised RuntimeError: SystemExit: 3 (test_several_rewards.py:{line + 7})",
        f"Client raised RuntimeError: StopIteration:  (test_several_rewards.py:{line + 9})",
    ]
    assert judge.notes[0].startswith("reward Client runs in this process, as with scoring.workers = 0: it is a Client of")

    pool.limit_s = 0.05
    slow = RewardJudge(lambda completion: time.sleep(0.5), pool)
    (outcome,) = await slow(Task("t", "p"), [attempt("a")])
    assert outcome == InfraError("lambda did not return within 0.05 s and goes on in this process, where nothing kills it")


def test_a_list_from_python_is_a_list_of_rewards(place):
    env = reward_environment([lambda completion: 1.0, "exact"], ROWS, RewardPool(workers=0), weights=[0.5, 0.5])
    assert env.name == "lambda+exact" and len(env.notes) == 1
