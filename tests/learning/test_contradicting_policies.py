"""Two policies in one run learn what one cannot: their tasks contradict each other on the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contradicting_tasks import PLAYED, POLICIES, base_model, check_record, environments, random_adapter
from safetensors.torch import load_file

import tidemill
from tidemill.core.types import LossSpec, Sample, TrainResult
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import ADAPTER_WEIGHTS
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.policy_trainers import PolicyTrainers

STEPS = 100
LEARNS: dict[str, Any] = {
    "trainer": {"lora": {"rank": 16, "alpha": 32}, "lr": 3e-3},
    "rollout": {"groups": 8, "group_size": 16, "max_tokens": 1},
    "algorithm": {"name": "grpo", "entropy": 0.05},
    "placement": {"kind": "inline", "environment": {"workers": 0}},
    "eval": {"every": 0, "tasks": 4, "final_tasks": 4},
    "record": {"checkpoint_every": 0, "trace": False, "probe_every": 4},
    "engine": {"max_sequences": 256},
    "max_lag": 1,
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, str]]:
    """Every (policy of a trainer, group, policy of a row) that a gradient was computed of."""
    seen, forward_backward, build = set[tuple[str, int, str]](), NativeTrainer.forward_backward, PolicyTrainers.__init__
    names = dict[int, str]()

    def named(self: PolicyTrainers, trainers: Any, *more: Any) -> None:
        names.update({id(trainer): name for name, trainer in trainers.items()})
        build(self, trainers, *more)

    async def noted(self: NativeTrainer, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        seen.update((names[id(self)], sample.group, sample.policy) for sample in samples)
        return await forward_backward(self, samples, losses)

    monkeypatch.setattr(PolicyTrainers, "__init__", named)
    monkeypatch.setattr(NativeTrainer, "forward_backward", noted)
    return seen


@pytest.mark.runs
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_each_policy_learns_its_own_task(seed: int, tmp_path: Path, trained: set[tuple[str, int, str]]) -> None:
    """One policy would earn 1 at most in both tasks together: at each prompt they want another letter."""
    model = base_model(tmp_path / "model")
    judge = random_adapter(model, tmp_path / "judge")
    how = LEARNS | {"policies": POLICIES | {"judge": {"frozen": str(judge)}}, "seed": seed, "steps": STEPS}
    run = tidemill.train(environments(tmp_path, judged=True), model, run_dir=tmp_path / "run", quiet=True, **how)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps, report = [line for line in lines if "lag/mean" in line], run.report
    rewards = {name: np.array([s[f"reward/{name}"] for s in steps if f"reward/{name}" in s]) for name in PLAYED}
    first, last = ({name: float(each.mean()) for name, each in part.items()} for part in _ends(rewards))
    assert sum(last.values()) > 1.3, (first, last)
    assert all(last[name] > first[name] + 0.3 for name in PLAYED), (first, last)
    assert all(step["reward/next/asked"] == 1 for step in steps if "reward/next/asked" in step), "the judge was not asked"

    assert report["max_lag_seen"] == 1 and report["mismatch_lag0"]["tokens"] > 60
    assert report["mismatch_lag0"]["max"] < 1e-4 and report["groups"]["trained_twice"] == 0
    check_record(tmp_path / "run", STEPS, frozen={"judge": judge})
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        expected = {
            (policy, group.id, policy)
            for group in (ledger.load(group_id) for group_id in ledger.recorded())
            for policy in [PLAYED[group.task.env]]
        }
    assert trained <= expected, "a row trained another policy than the one that sampled it"
    assert len({group for _, group, _ in trained}) > STEPS
    ours, theirs = (load_file(tmp_path / "run" / "final" / f"{name}-adapter" / ADAPTER_WEIGHTS) for name in POLICIES)
    assert ours.keys() == theirs.keys() and any(not torch.equal(ours[name], theirs[name]) for name in ours)


def _ends(rewards: dict[str, Any], window: int = 10) -> tuple[dict[str, Any], dict[str, Any]]:
    return {name: each[:window] for name, each in rewards.items()}, {name: each[-window:] for name, each in rewards.items()}
