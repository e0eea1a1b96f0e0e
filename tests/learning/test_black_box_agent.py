"""A program with OpenAI's client as the agent: it is served by HTTP, and what the policy said to it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.attempt_checks import check_attempts
from tidemill.core.types import Score
from tidemill.ledger.ledger import SqliteLedger

RECIPE = str(Path(__file__).parents[2] / "recipes" / "black_box_agent.toml")


@pytest.mark.runs
def test_each_answer_to_the_program_is_a_row_of_its_attempt(tmp_path: Path) -> None:
    few = ["steps=3", "warmup.accuracy=0", "rollout.groups=2", "rollout.group_size=4", "eval.every=0"]
    said = CliRunner().invoke(app, ["train", RECIPE, f"run_dir={tmp_path / 'run'}", *few])
    assert said.exit_code == 0, said.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["groups"]["trained"] == 6 and report["groups"]["lost"] == 0
    assert report["mismatch_lag0"]["max"] < 1e-4 and report["mismatch_lag0"]["tokens"] > 10
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ledger.counts().conserved
        groups = [ledger.load(group_id) for group_id in ledger.recorded()]
    for group in groups:
        check_attempts(group)
        assert len(group.attempts) == 4 and all(sum(row.turns for row in rows) == 3 for rows in group.attempts)
        assert all(isinstance(rows[-1].outcome, Score) for rows in group.attempts)


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["train", RECIPE, f"run_dir={tmp_path / 'run'}"])
    assert said.exit_code == 0, said.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["accuracy_before"] < 0.4 and report["accuracy_after"] > 0.6, report["accuracy_after"]
