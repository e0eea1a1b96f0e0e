"""Whole runs that die or fail while they write checkpoints and folders, at every point: the same command goes on."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import Ended, Runs

from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.storage.checkpoint_manifest import verify

pytestmark = pytest.mark.runs

RECIPE = """
model = "{model}"
run_dir = "{run}"
env = {{ kind = "guess", low = 1, high = 4, turns = 2 }}
steps = {steps}
max_lag = 1
placement = "inline"
rollout = {{ groups = 2, group_size = 2, max_tokens = 2 }}
algorithm = {{ name = "grpo", zero_variance = "keep" }}
eval = {{ every = 0, tasks = 2, final_tasks = 2 }}
record = {{ checkpoint_every = 1, checkpoints = 2, probe_every = 0 }}
"""
WRITES = ("trainer:save", "trainer:save-optimizer", "controller:manifest", "controller:rename")
POINTS = ("controller:checkpoint", "trainer:snapshot", *WRITES, "controller:retain")


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    from tidemill.envs.guess import ALPHABET

    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tmp_path / "model", run=tmp_path / "run", steps=4))
    return path


def check_complete(recipe: Path, ended: Ended, steps: int = 4) -> None:
    """The run came to its end with every group's one fate, and left whole folders only."""
    assert ended.status == 0, ended.output
    folder = recipe.parent / "run"
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.row_factory = sqlite3.Row
        found = dict(db.execute("SELECT * FROM conservation").fetchone())
        sizes = [n for _, n in db.execute("SELECT step, count(*) FROM live_step_groups GROUP BY step ORDER BY step")]
    assert found == {"admitted": 2 * steps, "trained": 2 * steps, "dropped": 0, "pending": 0, "lost": 0, "trained_twice": 0}
    assert sizes == [2] * steps
    assert json.loads((folder / "report.json").read_text())["steps"] == steps
    assert (folder / "final" / "model.safetensors").is_file() and (folder / "initial" / "config.json").is_file()
    left = [p.name for p in folder.rglob("*") if ".partial" in p.name or ".replaced" in p.name]
    assert not left, f"what was cut off is still there: {left}"
    for checkpoint in (folder / "checkpoints").iterdir():
        verify(checkpoint)


def kinds(recipe: Path) -> list[str]:
    with sqlite3.connect(recipe.parent / "run" / "ledger.sqlite") as db:
        return [kind for (kind,) in db.execute("SELECT kind FROM events ORDER BY id")]


def killed_again_and_again(runs: Runs, recipe: Path, faults: list[str], *overrides: str) -> Ended:
    for count in range(len(faults)):
        ended = runs.train(recipe, *overrides, faults=" ".join(faults))
        assert ended.status == -9 and len(ended.happened) == 1, f"after {count} kills: {ended}"
    ended = runs.train(recipe, *overrides, faults=" ".join(faults))
    assert ended.happened == [], "every fault had happened, each once"
    return ended


@pytest.mark.slow
def test_killed_at_every_point_of_the_first_checkpoint_and_of_the_end(runs, recipe):
    torn = {"trainer:save", "controller:manifest"}
    faults = [f"{p}:*:{'torn-write' if p in torn else 'kill'}" for p in POINTS]
    faults = ["controller:config:*:kill", *faults, "controller:final:*:kill", "controller:report:*:kill"]
    check_complete(recipe, killed_again_and_again(runs, recipe, faults))


def test_a_full_disk_ends_the_run_with_one_sentence_and_the_same_command_goes_on(runs, recipe):
    faults = " ".join(f"{p}:*:disk-full" for p in WRITES)
    for point in WRITES:
        ended = runs.train(recipe, faults=faults)
        assert ended.status == 1 and ended.happened == [f"{point}:*:disk-full"], ended
        last = ended.output.splitlines()[-1]
        assert last.startswith("error: checkpoint ") and "No space left on device" in last and "/checkpoints/step-" in last
        whole = [p for p in (recipe.parent / "run" / "checkpoints").iterdir() if p.suffix != ".partial"]
        assert [verify(p).step for p in whole] == [int(p.name[5:]) for p in whole]
    check_complete(recipe, runs.train(recipe, faults=faults))


def test_damage_is_fallen_back_on_loudly_and_never_to_the_beginning(runs, recipe):
    ended = runs.train(recipe, "steps=3")
    assert ended.status == 0, ended.output
    folder = recipe.parent / "run" / "checkpoints"
    os.truncate(folder / "step-000003" / "trainer" / "optimizer.safetensors", 1000)
    keep = shutil.copytree(folder / "step-000002", recipe.parent / "keep")
    shutil.rmtree(folder / "step-000002" / "trainer")
    ended = runs.train(recipe)
    assert ended.status == 1 and "error: " in ended.output and "none of them is usable" in ended.output.splitlines()[-1]
    assert kinds(recipe).count("checkpoint_invalid") == 2
    shutil.rmtree(folder / "step-000002")
    shutil.copytree(keep, folder / "step-000002")
    ended = runs.train(recipe)
    assert "step-000003 cannot be used" in ended.output and "going on from the older checkpoint step-000002" in ended.output
    assert "recorded steps again (from step 2)" in ended.output
    assert (folder / "step-000003.damaged").is_dir()
    shutil.rmtree(folder / "step-000003.damaged")
    check_complete(recipe, ended)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "torn-write"])
def test_killed_at_every_point_when_there_are_checkpoints_already(runs, recipe, kind):
    """Every third step, one of the points, with two whole checkpoints before it."""
    faults = [f"{point}:{3 + 4 * i}:{kind}" for i, point in enumerate(POINTS)]
    ended = killed_again_and_again(runs, recipe, faults, "steps=32")
    check_complete(recipe, ended, steps=32)


@pytest.mark.slow
@pytest.mark.parametrize("point", WRITES)
def test_killed_in_processes_of_their_own(runs, recipe, point):
    ended = killed_again_and_again(runs, recipe, [f"{point}:2:torn-write"], "placement=local")
    check_complete(recipe, ended)


@pytest.mark.slow
def test_killed_at_every_point_a_deterministic_run_ends_in_the_same_bits(runs, recipe, tmp_path):
    undisturbed = runs.train(recipe, "deterministic=true", f"run_dir={tmp_path / 'other'}")
    assert undisturbed.status == 0, undisturbed.output
    faults = [f"{point}:*:kill" for point in (*POINTS, "controller:final")]
    check_complete(recipe, killed_again_and_again(runs, recipe, faults, "deterministic=true"))
    final, other = (tmp_path / name / "final" / "model.safetensors" for name in ("run", "other"))
    assert final.read_bytes() == other.read_bytes()


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(runs, recipe):
    often = ("steps=5", "eval.every=2", "record.checkpoint_every=4")
    ended = runs.train(recipe, *often, faults="controller:train:3:kill")
    assert ended.status == -9 and len(ended.happened) == 1
    with sqlite3.connect(recipe.parent / "run" / "ledger.sqlite") as db:  # as if it had come a moment earlier
        assert db.execute("DELETE FROM evals WHERE step = 2").rowcount == 1
    ended = runs.train(recipe, *often)
    assert ended.status == 0, ended.output
    with sqlite3.connect(recipe.parent / "run" / "ledger.sqlite") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM evals ORDER BY id")]
        lives = [life for (life,) in db.execute("SELECT incarnation FROM versions WHERE step = 2 ORDER BY incarnation")]
    assert steps == [0, 2, 4, 5], "no evaluation twice, and none left out"
    assert lives == [0, 1], "what was evaluated was published as what it is"
