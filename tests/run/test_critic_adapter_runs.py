"""Runs that train adapters of critics: PPO, cut off and gone on with, and a reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_given_runs import environment, learn, many, steps_of

import tidemill
from tidemill.core.errors import UnsupportedModel
from tidemill.envs.guess import ALPHABET
from tidemill.models.adapter_config import ADAPTER_WEIGHTS, AdapterConfig
from tidemill.models.adapter_files import PREFIX, fill
from tidemill.models.hf_weights import SCORE, hf_views, load_folder
from tidemill.models.lora import attach, merge
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.value_model import load_value_model
from tidemill.trainer.trainer_kinds import LoraSettings

pytestmark = pytest.mark.runs

LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def train(folder: Path, steps: int, **trainer: Any) -> tidemill.Run:
    how: dict[str, Any] = {
        "trainer": {"lora": LORA, "lr": 1e-2, **trainer},
        "rollout": {"groups": 4, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "ppo", "critic": {"model": "initial", "lr": 2e-2}},
        "eval": {"every": 0, "tasks": 1, "final_tasks": 1},
        "record": {"checkpoint_every": 2, "trace": False, "probe_every": 1},
        "scoring": {"accept": ["gold", "garbage"]},
        "placement": "inline",
        "deterministic": True,
    }
    if not (model := folder.parent / "model").exists():
        fresh_model(model, alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 2}
    return tidemill.train(env, model, run_dir=folder, quiet=True, steps=steps, max_lag=0, **how)


@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
def test_a_critic_beside_an_adapter_is_trained_and_goes_on_to_the_bit(tmp_path: Path, base_dtype: str) -> None:
    lora = {"lora": {**LORA, "base_dtype": base_dtype}}
    whole = train(tmp_path / "whole", 6, **lora)
    train(tmp_path / "cut", 4, **lora)
    cut = train(tmp_path / "cut", 6, **lora)
    ours, theirs = (load_file(run.folder / "final-adapter" / ADAPTER_WEIGHTS) for run in (whole, cut))
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    kept = [
        load_file(run.folder / "checkpoints" / "step-000004" / "trainer" / "optimizer.safetensors") for run in (whole, cut)
    ]
    of_critic = {name for name in kept[0] if name.startswith("critic.")}
    assert of_critic and all(".adapter." in name or name.endswith("head.weight") for name in of_critic)
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in of_critic)
    assert all(kept[0][name].any() for name in of_critic if ".adapter.b." in name), "all of its adapter was trained"
    steps = steps_of(whole)
    assert len(steps) == 6 and all(0 < step["train/critic/grad_norm"] < np.inf for step in steps[-3:])
    assert whole.report["mismatch_lag0"]["max"] < 1e-4


def test_a_reward_model_is_trained_by_its_adapter(tmp_path: Path) -> None:
    table = {"steps": 40, "trainer": {"lr": 3e-3, "lora": {"rank": 8}}, "rollout": {"groups": 16, "max_tokens": 3}}
    judge = learn(tmp_path, environment(tmp_path, many), "reward_model", **table)
    before, after = judge.report["held_out_given"]["before"], judge.report["held_out_given"]["after"]
    assert before["preference_loss"] == pytest.approx(np.log(2), abs=1e-6) and after["preference_loss"] < 0.6, after
    config = json.loads((judge.final / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    base, merged = load_folder(tmp_path / "model"), load_value_model(judge.final)
    moved = {n for (n, a), (_, b) in zip(hf_views(base), hf_views(merged.decoder), strict=True) if not torch.equal(a, b)}
    adapter = load_file(judge.folder / "final-adapter" / ADAPTER_WEIGHTS)
    matrices = {f"{name.removeprefix(PREFIX).removesuffix('.lora_A.weight')}.weight" for name in adapter if "lora_A" in name}
    assert moved == matrices and torch.equal(adapter[PREFIX + SCORE], merged.head.weight)


@pytest.mark.ranks
def test_ranks_export_one_reward_model(tmp_path: Path) -> None:
    several = {"lr": 3e-3, "lora": {"rank": 3}, "ranks": 2, "shard": "zero3"}
    rollout = {"groups": 16, "max_tokens": 3}
    judge = learn(
        *(tmp_path, environment(tmp_path, many), "reward_model"),
        steps=4,
        trainer=several,
        rollout=rollout,
        placement="local",
    )
    adapter, merged = load_file(judge.folder / "final-adapter" / ADAPTER_WEIGHTS), load_value_model(judge.final)
    head = adapter.pop(PREFIX + SCORE)
    with pytest.raises(UnsupportedModel, match="is a reward model's adapter"):  # no policy begins from it
        AdapterConfig.from_folder(judge.folder / "final-adapter")
    model = load_folder(tmp_path / "model")
    attach(model, LoraSettings(rank=3).config)
    fill(model, {name.removeprefix(PREFIX): each for name, each in adapter.items()}, "final-adapter")
    merge(model)
    assert torch.equal(head, merged.head.weight) and head.any()
    pairs = zip(hf_views(model), hf_views(merged.decoder), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
