"""Reward rises: the whole system in one process, on tasks of seconds, with a 0.1 M-parameter model that knows nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidemill
from tidemill.envs.guess import ALPHABET
from tidemill.models.fresh import SIZES, fresh_model

LETTERS = "abcd"


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
        "placement": "inline",
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


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_reward_rises_for_every_lag(max_lag, tmp_path):
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 3}
    steps, report = learn(tmp_path, repeat, LETTERS + "=:\n", steps=50, max_lag=max_lag, rollout=rollout)
    rewards = [s["reward/mean"] for s in steps if s.get("reward/mean") is not None]
    assert risen(steps) > 4, rewards
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.2
    assert report["max_lag_seen"] <= max_lag
    assert (report["max_lag_seen"] == 0) == (max_lag == 0), "asynchronous runs must really lag"
    assert report["mismatch_lag0"]["tokens"] > 60 and report["mismatch_lag0"]["max"] < 1e-4
    groups = report["groups"]
    assert groups["admitted"] == groups["trained"] == 400 and groups["lost"] == groups["trained_twice"] == 0
    if max_lag == 0:  # exactly on-policy: whatever is trained on was sampled by these very weights
        assert report["staleness"]["tokens"] == 0
        assert max(s["mismatch/lag0/logprob_gap_max"] for s in steps) < 1e-4


def test_the_guessing_game_is_learnt(tmp_path):
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 3}
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 2, "temperature": 1.0}
    steps, report = learn(tmp_path, env, ALPHABET, steps=60, max_lag=1, rollout=rollout)
    assert risen(steps) > 4, [s["reward/mean"] for s in steps]
    assert report["max_lag_seen"] <= 1
    assert report["mismatch_lag0"]["max"] < 1e-4


def test_temperature_is_part_of_the_policy(tmp_path):
    """Behaviour logprobs are of the sampled distribution: at a temperature other than 1 trainer and engine still agree."""
    rollout = {"groups": 4, "group_size": 4, "max_tokens": 3, "temperature": 0.7}
    _, report = learn(tmp_path, repeat, LETTERS + "=:\n", steps=16, max_lag=1, rollout=rollout)
    assert report["mismatch_lag0"]["tokens"] > 60 and report["mismatch_lag0"]["max"] < 1e-4
