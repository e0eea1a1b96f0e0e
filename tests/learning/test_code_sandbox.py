"""A policy learns to write programs: its replies are run in a sandbox, and judged by what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.envs.code_checks.code_settings import settings_of, working_level
from tidemill.envs.rewards.code import score
from tidemill.ledger import SqliteLedger

RECIPE = Path(__file__).parents[2] / "recipes" / "code_sandbox.toml"
FAST = ["warmup.accuracy=0.05", "rollout.groups=4", "rollout.group_size=4", "eval.every=0", "eval.final_tasks=4"]

try:
    LEVEL = working_level(settings_of({}))
except ConfigError as why:
    pytest.skip(str(why), allow_module_level=True)


def train(folder: Path, *overrides: str) -> dict[str, object]:
    said = CliRunner().invoke(app, ["train", str(RECIPE), f"run_dir={folder}", *overrides])
    assert said.exit_code == 0, said.output
    return json.loads((folder / "report.json").read_text())


def test_the_answers_of_the_recipe_are_right() -> None:
    tasks = load_object(f"{RECIPE.with_suffix('.py')}:tasks")
    assert not {row["prompt"] for row in tasks("train")} & {row["prompt"] for row in tasks("eval")}
    patient = {"sandbox": {"seconds": 120.0, "warm": 0}, "budget_s": 600.0}
    for row in tasks("eval")[::4]:
        assert score(row["answer"], cases=row["cases"], **patient).value == 1.0  # type: ignore[union-attr]
        other = row["answer"].replace("input())", "input())+1-")
        assert score(other, cases=row["cases"], **patient).value == 0.0  # type: ignore[union-attr]


@pytest.mark.runs
def test_a_run_judges_by_the_sandbox_and_says_at_which_level(tmp_path: Path) -> None:
    report = train(tmp_path / "run", "steps=2", *FAST)
    assert report["sandbox"] == {"rows:code_sandbox": LEVEL}
    judged = report["judging"]
    assert isinstance(judged, dict) and judged["scored"] >= 32 and judged["infra_errors"] == 0
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        (event,) = ledger.events("sandbox")
        assert event.detail == {"environment": "rows:code_sandbox", "level": LEVEL}
        assert ledger.counts().conserved


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    report = train(tmp_path / "run")
    before, after = report["accuracy_before"], report["accuracy_after"]
    assert isinstance(before, float) and isinstance(after, float) and after > before + 0.3, (before, after)
