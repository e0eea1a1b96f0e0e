"""Recipes: short forms, what overrides reach, what a run that goes on may change, and mistakes that are caught at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidemill.core.config import dump
from tidemill.core.errors import ConfigError
from tidemill.run.planner import plan
from tidemill.run.recipe import RunConfig, load_recipe
from tidemill.run.recipe_files import MAY_CHANGE, check_same_run
from tidemill.trainer.trainer_kinds import TrainerSettings

BASE = {"run_dir": "runs/x", "model": "new:0.1m", "env": "guess"}


def load(*overrides: str) -> RunConfig:
    return load_recipe([], overrides, BASE)


def test_short_forms_and_overrides_into_them():
    config = load("placement=inline", "placement.engines=2", "algorithm=dapo", "algorithm.clip_high=0.3", "env.high=9")
    assert (config.placement.kind, config.placement.engines) == ("inline", 2)
    assert (config.algorithm.name, config.algorithm.constants["clip_high"], config.algorithm.zero_variance) == (
        "dapo",
        0.3,
        "drop",
    )
    assert config.env.high == 9
    assert load("algorithm.advantage=remax").algorithm == load("algorithm=grpo", "algorithm.advantage=remax").algorithm


def test_every_recipe_takes_the_plain_keys():
    config = load("run_dir=a", "seed=3", "steps=4", "max_lag=2", "model=new:2m", "env=reasoning_gym:gcd", "algorithm=rloo")
    assert (config.run_dir, config.seed, config.steps, config.max_lag) == (Path("a"), 3, 4, 2)
    assert config.env.dataset == "gcd" and config.algorithm.advantage == "rloo"


def test_an_agent_is_late_before_its_episode_is():
    agent = "env={kind='agent',command='python a.py',data='a.jsonl',limit_s=%g}"
    assert load(agent % 599).env.limit_s == 599
    with pytest.raises(ConfigError, match=r"env.limit_s = 600 is not less than rollout.episode_s = 600"):
        load(agent % 600)
    assert load(agent % 600, "rollout.episode_s=601").rollout.episode_s == 601


@pytest.mark.parametrize(
    ("given", "goes"),
    [
        (["algorithm=grpo"], False),
        (["algorithm=grpo", "algorithm.old_logprobs=recompute"], True),
        (["algorithm=decoupled_ppo"], True),
        (["algorithm=dpo"], True),
        (["algorithm=sft"], True),
        (["algorithm=decoupled_ppo", "env=[{kind='guess',name='a'},{kind='guess',name='b',algorithm='grpo'}]"], False),
    ],
)
def test_dropout_needs_the_trainers_own_logprobs_of_what_is_sampled(given: list[str], goes: bool):
    def dropping(share: float) -> RunConfig:
        return load(f"trainer.lora.dropout={share}", *given)

    assert isinstance(dropping(0.0).trainer, TrainerSettings)
    if goes:
        assert dropping(0.3).trainer.lora.config.dropout == 0.3
    else:
        with pytest.raises(ConfigError, match=r"trainer\.lora\.dropout = 0\.3 .*set algorithm\.old_logprobs = 'recompute'"):
            dropping(0.3)


def test_a_resolved_recipe_reads_back_as_itself():
    config = load("algorithm=aipo", "rollout.window=9", "env=reasoning_gym:gcd")
    assert load_recipe([], (), dump(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size=1", "group size 1 with advantage 'grpo'"),
        ("rollout.window=99", "at most max_lag"),
        ("algorithm=gropo", "did you mean 'grpo'"),
        ("env=gess", "did you mean 'guess'"),
        ("max_lagg=2", "did you mean 'max_lag'"),
        ("max_tokens=9", "unknown key 'max_tokens'; here it is 'rollout.max_tokens'"),
        ("placement.device=cuda", "'placement.device'; here it is 'engine.device' or 'trainer.device'"),
        ("trainer.learning_rate=3", "here it is 'trainer.lr'"),
        ("trainer.beta=0.1", r"here it is algorithm.reference = \{ kl"),
        ("steps=0", "steps = 0"),
        ("placement=ray", "placement.kind = 'ray'"),
        ("trainer.lr=fast", "trainer.lr = 'fast'"),
    ],
)
def test_mistakes_are_caught_at_once(override, message):
    with pytest.raises(ConfigError, match=message):
        load(override)


@pytest.mark.parametrize(
    ("overrides", "streams"),
    [
        ([], True),
        (["placement.trainer_threads=2"], False),
        (["placement.trainer_threads=2", "placement.stream=true"], True),
        (["placement.stream=false"], False),
        (["placement=inline"], False),
        (["placement.engines=2"], False),
        (["placement.engines=2", "trainer.device=cuda:1", "engine.device=cuda"], True),
        (["placement.engines=2", "trainer.device=cuda:0", "engine.device=cuda"], False),
        (["placement.engines=2", "trainer.device=cpu"], False),
        (["deterministic=true", "placement.stream=true"], False),
    ],
)
def test_a_trainer_begins_early_where_it_takes_nothing_from_engines(overrides, streams, monkeypatch):
    monkeypatch.setattr(plan, "usable_cores", lambda: 2)
    assert plan.plan_of(load(*overrides)).streams is streams


def test_a_run_that_goes_on_keeps_its_recipe(tmp_path):
    old = dump(load())
    for fine in ("steps=500", "placement=inline", "eval.every=3", "record.checkpoints=5", "scoring.workers=1"):
        check_same_run(old, dump(load(fine)), tmp_path)
    for not_fine, said in {
        "seed=1": "seed was 0 and is 1",
        "max_lag=3": "max_lag was 1 and is 3",
        "model=new:2m": "model was 'new:0.1m' and is 'new:2m'",
        "env.high=9": "env.high was 16 and is 9",
        "trainer.lr=1": "trainer.lr was 1e-06 and is 1.0",
        "algorithm=rloo": "algorithm.advantage was 'grpo' and is 'rloo'",
        "rollout.groups=3": "rollout.groups was 16 and is 3",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"another recipe: {said}")):
            check_same_run(old, dump(load(not_fine)), tmp_path)
    assert set(RunConfig.model_fields) >= MAY_CHANGE
