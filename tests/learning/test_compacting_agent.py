"""An agent that compacts its history learns: its attempts have several rows, and all are trained with one score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_learning import learn, risen
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.import_object import load_object
from tidemill.core.types import Score
from tidemill.ledger.ledger import SqliteLedger

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.runs
def test_reward_rises_for_attempts_of_several_rows(tmp_path: Path) -> None:
    env = load_object(f"{RECIPES / 'compacting_agent.py'}:remembered")
    rollout = {"groups": 8, "group_size": 8, "max_tokens": 3}
    how: dict[str, Any] = {"rollout": rollout, "steps": 50, "max_lag": 1, "algorithm": "grpo"}
    steps, report = learn(tmp_path, env, "0123456=\n", **how)
    assert risen(steps) > 4, [step["reward/mean"] for step in steps]
    assert report["max_lag_seen"] == 1 and report["mismatch_lag0"]["max"] < 1e-4 and report["mismatch_lag0"]["tokens"] > 60
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.counts().conserved
        groups = [ledger.load(group_id) for group_id in ledger.recorded()]
    rows = [row for group in groups for row in group.trajectories]
    for group in groups:
        check_attempts(group)
        assert len(group.attempts) == 8 and all(sum(row.turns for row in own) == 9 for own in group.attempts)
        assert all(isinstance(own[-1].outcome, Score) for own in group.attempts)
    assert len(rows) > 2 * len(groups) * 8, "the history was hardly ever compacted"
    assert any(row.parent is not None for row in rows), "no two conversations of an attempt began alike"
    trained = sum(step["train/tokens"] for step in steps)
    dropped = {group.id for group in groups} - {group_id for step in range(50) for group_id in ledger_groups(tmp_path, step)}
    assert trained == sum(row.sampled for group in groups if group.id not in dropped for row in group.trajectories)

    said = CliRunner().invoke(app, ["samples", str(tmp_path / "run"), "--json"])
    assert said.exit_code == 0 and "parent" in json.loads(said.output)[0], said.output
    said = CliRunner().invoke(app, ["parity", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output


def ledger_groups(folder: Path, step: int) -> list[int]:
    with SqliteLedger(folder / "run", mode="read") as ledger:
        return list(ledger.groups_of(step))


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["train", str(RECIPES / "compacting_agent.toml"), f"run_dir={tmp_path / 'run'}"])
    assert said.exit_code == 0, said.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before, after = report["accuracy_before"], report["accuracy_after"]
    assert before < 0.3 and after > 0.8, (before, after)
