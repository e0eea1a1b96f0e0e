"""Training on replies that are held to a schema: each one is valid from the first step on, and what is trained is exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tidemill
from tidemill.core.types import Finish
from tidemill.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model

DIGITS = "0123"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


@tidemill.environment(tasks=lambda split: [{"prompt": c + ("=" if split == "train" else ":")} for c in DIGITS])
async def repeat_as_json(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """Say the digit as JSON. A reply that is not cut is nothing else than valid JSON."""
    reply = await chat.complete(task.prompt, schema=SCHEMA)
    if reply.finish is not Finish.STOP:
        return tidemill.Score(0.0)
    return tidemill.Score(float(json.loads(reply.text)["n"] == int(task.prompt[0])))


@pytest.mark.runs
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "temperature": 0.8}])
def test_a_policy_learns_under_a_schema(sampling: dict[str, float], tmp_path: Path) -> None:
    fresh_model(tmp_path / "model", alphabet='0123456789{}"n:,= \n', context=64, **SIZES["0.1m"])
    run = tidemill.train(
        repeat_as_json,
        tmp_path / "model",
        run_dir=tmp_path / "run",
        quiet=True,
        steps=40,
        max_lag=1,
        rollout={"groups": 8, "group_size": 8, "max_tokens": 60, **sampling},
        placement={"kind": "inline", "environment": {"workers": 0}},
        trainer={"lr": 3e-3},
        eval={"every": 0, "tasks": 4, "final_tasks": 4},
        record={"checkpoint_every": 0, "trace": False, "probe_every": 4},
        engine={"max_sequences": 128},
    )
    assert run.report["mismatch_lag0"]["tokens"] > 60 and run.report["mismatch_lag0"]["max"] < 1e-4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.2, rewards
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        rows = [row for number in range(8) for row in ledger.load(number).trajectories]
    assert all(row.support is not None and row.support.positions == row.sampled for row in rows)
