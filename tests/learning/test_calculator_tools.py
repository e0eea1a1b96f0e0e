"""A policy learns to call a tool and to use its result, in attempts of several replies and observations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_learning import learn, risen
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.ledger.ledger import SqliteLedger

RECIPES = Path(__file__).parents[2] / "recipes"


@tidemill.tool
def code(a: int) -> str:
    """Tell a letter's code, which nobody can know without asking.

    Args:
        a: The number of the letter.
    """
    return "xzwvy"[a]


def tasks(split: str) -> list[dict[str, Any]]:
    found = []
    for n in (n for n in range(100) if (n % 8 == 7) is (split == "eval")):
        secret = "xzwvy"[n % 5]
        said = [{"role": "assistant", "content": f"code({n % 5})"}, {"role": "tool", "content": secret}]
        demonstration = [*said, {"role": "assistant", "content": secret}]
        found.append({"prompt": f"{n:02}.{n % 5}", "answer": secret, "demonstration": demonstration})
    return found


@tidemill.environment(tasks=tasks)
async def coded(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    done = await chat.work(task.prompt, [code], max_turns=2, max_tokens=8)
    called = bool(done.results) and not done.results[0].fault
    right = done.ended == "answer" and done.text == task.data["answer"] and called
    return tidemill.Score(0.5 * called + 0.5 * right, {"called": called, "right": right})


@pytest.mark.runs
def test_reward_rises_for_calls_of_tools(tmp_path: Path) -> None:
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 8, "temperature": 0.4}
    how: dict[str, Any] = {"rollout": rollout, "steps": 40, "max_lag": 1, "algorithm": "grpo", "trainer": {"lr": 3e-4}}
    warmup = {"accuracy": 0.5, "lr": 1e-3, "batch": 32}
    steps, report = learn(tmp_path, coded, "0123456789xzwvycode().\n", warmup=warmup, **how)
    assert risen(steps) > 4, [step["reward/mean"] for step in steps]
    assert report["max_lag_seen"] == 1 and report["mismatch_lag0"]["max"] < 1e-4
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.counts().conserved
        groups = [ledger.load(group_id) for group_id in ledger.recorded()]
    rows = [row for group in groups for row in group.trajectories]
    assert all(row.parent is None for row in rows), "an attempt that only goes on has branched"
    assert sum(row.turns == 2 for row in rows) > len(rows) / 4
    for row in (each for each in rows if each.turns == 2):
        roles = [said.role for said in row.said]
        assert roles[:3] in (["user", "assistant", "tool"], ["user", "assistant", "user"]), roles


@pytest.mark.slow
def test_the_recipe_learns_to_use_a_calculator(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["train", str(RECIPES / "calculator_tools.toml"), f"run_dir={tmp_path / 'run'}"])
    assert said.exit_code == 0, said.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before, after = report["accuracy_before"], report["accuracy_after"]
    assert before < 0.7 and after > max(0.8, before + 0.15), (before, after)
