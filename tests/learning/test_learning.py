"""Reward rises: the whole system in one process, on tasks of seconds, with a 0.1 M-parameter model that knows nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidemill
from tidemill.algorithms.presets import PRESETS
from tidemill.envs.guess import ALPHABET
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model

LETTERS = "abcd"
IN_PLACE = {"kind": "inline", "environment": {"workers": 0}}  # no process at all: it starts at once


@tidemill.environment(
    tasks=lambda split: [{"prompt": f"{c}{x}"} for c in LETTERS for x in ("=" if split == "train" else ":")]
)
async def repeat(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """Say the first letter (0.5), and nothing else (0.5)."""
    letter, reply = task.prompt[0], await chat.reply(task.prompt)
    return tidemill.Score(0.5 * reply.startswith(letter) + 0.5 * (reply == letter))


def learn(folder: Path, env: Any, alphabet: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train inline; returns the metrics of the steps and the report."""
    fresh_model(folder / "model", alphabet=alphabet, context=64, **SIZES["0.1m"])
    tables = {
        "placement": IN_PLACE,
        "trainer": {"lr": 3e-3},
        "eval": {"every": 0, "tasks": 4, "final_tasks": 4},
        "record": {"checkpoint_every": 0, "trace": False, "probe_every": 4},
        "engine": {"max_sequences": 256},
    }
    run = tidemill.train(env, folder / "model", run_dir=folder / "run", quiet=True, **tables | settings)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "lag/mean" in line], run.report


def risen(steps: list[dict[str, Any]], window: int = 8) -> float:
    """The last steps' mean reward over the first ones', in standard errors of the difference."""
    rewards = np.array([s["reward/mean"] for s in steps if s.get("reward/mean") is not None])
    first, last = rewards[:window], rewards[-window:]
    return float((last.mean() - first.mean()) / np.sqrt(first.var(ddof=1) / window + last.var(ddof=1) / window))


@pytest.mark.runs
@pytest.mark.parametrize("max_lag", [*(pytest.param(lag, marks=pytest.mark.slow) for lag in (0, 1)), 4])
def test_reward_rises_for_every_lag(max_lag, tmp_path):
    """With a lag from one of two seeds: time says which version samples a group, and one of 64 runs of lag 1 rose too
    little. All else must hold of every run."""
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 3}
    rewards = {}
    for seed in (0, 1) if max_lag else (0,):
        folder = tmp_path / str(seed)
        steps, report = learn(folder, repeat, LETTERS + "=:\n", steps=50, max_lag=max_lag, rollout=rollout, seed=seed)
        check_truth(steps, report, max_lag)
        rewards[seed] = [s["reward/mean"] for s in steps if s.get("reward/mean") is not None]
        if risen(steps) > 4 and np.mean(rewards[seed][-8:]) > np.mean(rewards[seed][:8]) + 0.2:
            return
    pytest.fail(f"not learnt: {rewards}")


def check_truth(steps: list[dict[str, Any]], report: dict[str, Any], max_lag: int) -> None:
    assert report["max_lag_seen"] <= max_lag
    assert (report["max_lag_seen"] == 0) == (max_lag == 0), "asynchronous runs must really lag"
    assert report["mismatch_lag0"]["tokens"] > 60 and report["mismatch_lag0"]["max"] < 1e-4
    groups = report["groups"]
    assert groups["admitted"] == groups["trained"] == 8 * len(steps) and groups["lost"] == groups["trained_twice"] == 0
    if max_lag == 0:  # exactly on-policy: whatever is trained on was sampled by these very weights
        assert report["staleness"]["tokens"] == 0
        assert max(s["mismatch/lag0/logprob_gap_max"] for s in steps) < 1e-4


@pytest.mark.slow
def test_taking_turns_on_a_device_changes_nothing_of_what_is_learnt(tmp_path):
    """With one seed and fixed bits of sums: engines that sleep in the trainer's turn come to the same weights."""
    rollout, models = {"groups": 4, "group_size": 4, "max_tokens": 3}, []
    for share in ("beside", "sleep"):
        folder = tmp_path / share
        how = {"steps": 6, "max_lag": 1, "deterministic": True, "seed": 5, "rollout": rollout}
        how |= {"placement": IN_PLACE | {"share": share}, "engine": {"max_sequences": 64, "page_size": 2}}
        steps, report = learn(folder, repeat, LETTERS + "=:\n", **how)
        check = report["groups"]
        assert check["admitted"] == check["trained"] == 24 and report["mismatch_lag0"]["max"] < 1e-4
        assert any(step.get("prefix_cache/lost_tokens") for step in steps) is (share == "sleep")
        models.append(load_folder(folder / "run" / "final").state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_a_policy_learns_while_its_rollouts_pause_for_the_trainers_turns(tmp_path):
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 3}
    for seed in (0, 1):
        how = {"steps": 50, "max_lag": 2, "rollout": rollout, "seed": seed, "placement": IN_PLACE | {"share": "sleep"}}
        steps, report = learn(tmp_path / str(seed), repeat, LETTERS + "=:\n", **how)
        check_truth(steps, report, 2)
        if risen(steps) > 4:
            return
    pytest.fail("not learnt")


def test_without_lag_every_token_is_of_the_weights_that_train_on_it(tmp_path):
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 3}
    steps, report = learn(tmp_path, repeat, LETTERS + "=:\n", steps=9, max_lag=0, rollout=rollout)
    assert len(steps) == 9
    check_truth(steps, report, 0)


@pytest.mark.slow
def test_the_guessing_game_is_learnt(tmp_path):
    """From one of two seeds: time says which version samples a group, and one of 46 runs rose too little."""
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 3}
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 2, "temperature": 1.0}
    rewards = {}
    for seed in (0, 1):
        steps, report = learn(tmp_path / str(seed), env, ALPHABET, steps=60, max_lag=1, rollout=rollout, seed=seed)
        assert report["max_lag_seen"] <= 1
        assert report["mismatch_lag0"]["max"] < 1e-4
        if risen(steps) > 4:
            return
        rewards[seed] = [s["reward/mean"] for s in steps]
    pytest.fail(f"not learnt: {rewards}")


def test_temperature_is_part_of_the_policy(tmp_path):
    """Behaviour logprobs are of the sampled distribution: at a temperature other than 1 trainer and engine still agree."""
    rollout = {"groups": 4, "group_size": 4, "max_tokens": 3, "temperature": 0.7}
    _, report = learn(tmp_path, repeat, LETTERS + "=:\n", steps=16, max_lag=1, rollout=rollout)
    assert report["mismatch_lag0"]["tokens"] > 60 and report["mismatch_lag0"]["max"] < 1e-4


QUICK = ("grpo", "gspo", "cispo", "ppo", "rloo", "decoupled_ppo", "m2po", "opd", "pass_at_k")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, values in PRESETS.items()
        if "given" not in values
    ],
)
@pytest.mark.runs
def test_every_preset_trains_on_what_lags(name, tmp_path):
    """Whether it learns is measured in `benchmarks/algorithms.py`; here that all of its parts do their work in a run."""
    given: dict[str, Any] = {"name": name}
    if name == "opd":
        fresh_model(tmp_path / "teacher", alphabet=LETTERS + "=:\n", context=64, seed=9, **SIZES["0.1m"])
        given["reference"] = {"model": str(tmp_path / "teacher")}
    rollout = {"groups": 4, "group_size": 5, "max_tokens": 3}
    steps, report = learn(tmp_path, repeat, LETTERS + "=:\n", steps=4, max_lag=2, rollout=rollout, algorithm=given)
    assert len(steps) == 4 and report["max_lag_seen"] > 0
    assert report["mismatch_lag0"]["tokens"] > 0 and report["mismatch_lag0"]["max"] < 1e-4
    assert all(np.isfinite(step["train/loss"]) for step in steps)
    if name == "pass_at_k":
        return  # in four steps nothing is solved whole, and half a score is none there
    assert any(step["train/grad_norm"] > 0 for step in steps)
    initial, final = (load_folder(tmp_path / "run" / place).embed.weight for place in ("initial", "final"))
    assert not torch.equal(initial, final)


@pytest.mark.slow
def test_two_environments_with_an_algorithm_each_are_both_learnt(tmp_path):
    (tmp_path / "both.py").write_text(
        "import tidemill\n\n"
        "def of(those):\n"
        "    return lambda split: [{'prompt': c + ('=' if split == 'train' else ':')} for c in those]\n\n"
        "@tidemill.environment(tasks=of('abcd'))\n"
        "async def same(task, chat):\n"
        "    return tidemill.Score(float((await chat.reply(task.prompt)).startswith(task.prompt[0])))\n\n"
        "@tidemill.environment(tasks=of('1234'))\n"
        "async def following(task, chat):\n"
        "    wanted = '2341'['1234'.index(task.prompt[0])]\n"
        "    return tidemill.Score(float((await chat.reply(task.prompt)).startswith(wanted)))\n"
    )
    kind = {"kind": "python", "path": f"{tmp_path}/both.py:same"}
    env = [
        {**kind, "name": "same", "algorithm": "dr_grpo"},
        {**kind, "path": f"{tmp_path}/both.py:following", "name": "next", "weight": 2, "algorithm": "cispo"},
    ]
    rollout = {"groups": 9, "group_size": 8, "max_tokens": 1}
    steps, report = learn(tmp_path, env, LETTERS + "1234=:\n", steps=70, max_lag=1, rollout=rollout)
    for name, share in (("same", 3), ("next", 6)):
        rewards = [s[f"reward/{name}"] for s in steps if f"reward/{name}" in s]
        assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.3, (name, rewards)
        assert sum(s[f"train/{name}/groups"] for s in steps) == pytest.approx(70 * share, abs=3)
    groups = report["groups"]
    assert groups["admitted"] == groups["trained"] == 630 and groups["lost"] == groups["trained_twice"] == 0
