"""A run whose episodes wait for slow tools: what it records of them, and what `tidemill why` says of its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs
TASK = Path(__file__).parents[2] / "benchmarks" / "systems" / "tools_task.py"
STEPS, GROUPS, SIZE, LAG = 4, 2, 4, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 episodes in flight, with calls of 50 ms and 1.2 s in place of 0.5 and 12 s."""
    folder = tmp_path_factory.mktemp("slow")
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    fresh_model(folder / "model", alphabet=alphabet, context=256, **SIZES["0.1m"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_TOOLS_SCALE", "0.1")
        tidemill.train(
            f"{TASK}:slow_tools",
            str(folder / "model"),
            run_dir=folder / "run",
            quiet=True,
            steps=STEPS,
            max_lag=LAG,
            rollout={"groups": GROUPS, "group_size": SIZE, "max_tokens": 4},
            algorithm={"name": "grpo", "zero_variance": "keep"},
            eval={"every": 0, "tasks": 4, "final_tasks": 4},
            record={"checkpoint_every": 0, "trace": False, "probe_every": 0},
        )
    return folder / "run"


def reported(run: Path) -> dict[str, Any]:
    return json.loads((run / "report.json").read_text())


def test_episodes_are_seen_to_be_outside_for_as_long_as_their_tools_took(run: Path):
    found = reported(run)["engine_share"]
    with SqliteLedger(run, mode="read") as ledger:
        drawn = [json.loads(row[0])["tool_s"] for row in ledger._db.execute("SELECT parts FROM outcomes")]
    assert len(drawn) == found["episodes"] == STEPS * GROUPS * SIZE, "evaluations are not among them"
    assert (
        found["outside_s"] * len(drawn) >= 0.999 * sum(drawn) > 0
        and found["outside_p99_s"] >= found["outside_median_s"] > 0.005
    )


def test_shares_are_those_of_the_schedule_that_the_settings_allow(run: Path):
    found = reported(run)["engine_share"]
    assert found["places"] == (LAG + 1) * GROUPS * SIZE and found["engines"] == 1
    assert 0 < found["in_flight"] <= found["places"] and 0 < found["busy"] <= 1 and 0 < found["allowed"] <= 1
    assert found["of_allowed"] == pytest.approx(found["busy"] / found["allowed"], rel=0.01)


def test_why_says_it(run: Path):
    said = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["why", str(run)])
    found = reported(run)["engine_share"]
    text = " ".join(said.output.split())
    assert said.exit_code == 0 and "With at most 24 of these episodes in flight" in text
    assert f"have let them compute {found['allowed']:.0%}: they reached {found['of_allowed']:.0%} of that" in text
    data = json.loads(CliRunner().invoke(app, ["why", str(run), "--json"]).output)
    assert data["engine_share"] == found and "engine_share" in data["status"]
