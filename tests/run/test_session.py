"""A whole run as a user starts it, in its own processes: what it leaves behind, how it stops, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run import session
from tidemill.run.recipe import load_recipe
from tidemill.runtime.workers import keeper

RECIPE = """
model = "{model}"
env = {{ kind = "guess", low = 1, high = 4, turns = 2 }}
steps = {steps}
max_lag = 1
rollout = {{ groups = 4, group_size = 4, max_tokens = 2 }}
trainer.lr = 1e-3
eval = {{ every = 4, tasks = 4, final_tasks = 4 }}
record.checkpoint_every = 4
"""
LIMIT_S = 150


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    from tidemill.envs.guess import ALPHABET

    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tmp_path / "model", steps=10))
    return path


def command(recipe: Path, *overrides: str) -> list[str]:
    run_dir = f"run_dir={recipe.parent / 'run'}"
    return [sys.executable, "-m", "tidemill", "train", str(recipe), run_dir, *overrides, "--json"]


def start(recipe: Path, *overrides: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(recipe, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def lines_until(process: subprocess.Popen, wanted) -> list[dict]:
    """Read JSON lines until `wanted(line)`; fails when the process ends before."""
    assert process.stdout is not None
    seen = []
    for text in process.stdout:
        seen.append(json.loads(text))
        if wanted(seen[-1]):
            return seen
    raise AssertionError(f"ended with {process.wait(LIMIT_S)} before it came: {seen[-3:]}")


def finish(process: subprocess.Popen) -> list[dict]:
    out, _ = process.communicate(timeout=LIMIT_S)
    return [json.loads(line) for line in out.splitlines()]


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def conservation(folder: Path) -> dict[str, int]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.row_factory = sqlite3.Row
        return dict(db.execute("SELECT * FROM conservation").fetchone())


def test_a_run_in_processes_leaves_what_it_promises_and_nothing_else(recipe):
    process = start(recipe)
    lines = finish(process)
    assert process.returncode == 0, lines
    folder, report = recipe.parent / "run", lines[-1]
    assert report["kind"] == "report" and report["steps"] == 10
    for name in (
        "config.json",
        "metrics.jsonl",
        "report.json",
        "trace.json",
        "final/model.safetensors",
        "initial/config.json",
    ):
        assert (folder / name).exists(), name
    assert folder.stat().st_mode & 0o077 == 0, "a run folder is private"
    assert conservation(folder) == {"admitted": 40, "trained": 40, "dropped": 0, "pending": 0, "lost": 0, "trained_twice": 0}
    assert report["max_lag_seen"] <= 1 and report["mismatch_lag0"]["max"] < 1e-4
    assert set(report["memory_mb"]) == {"controller", "trainer", "engine-0"} and min(report["memory_mb"].values()) > 10
    assert report["versions_published"] == 11
    assert set(report["time_by_process"]) == {"controller", "trainer", "engine-0"} and report["advice"]["text"]
    for shares in report["time_by_process"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=0.002) and shares.get("other", 0) < 0.02
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"generate", "train", "publish", "commit"} <= {e["name"] for e in trace if e["ph"] == "X"}

    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in told if "train/reward" in each]
    assert len(steps) == 10 and all(each["reward/mean"] == pytest.approx(each["train/reward"]) for each in steps)

    again = start(recipe)  # a finished run is not run again
    lines = finish(again)
    said = " ".join(line.get("text", "") for line in lines)
    assert again.returncode == 0 and "complete" in said and lines[-1]["steps"] == 10

    other = start(recipe, "max_lag=3")
    out, _ = other.communicate(timeout=LIMIT_S)
    assert other.returncode == 2 and "max_lag was 1 and is 3" in out


@pytest.mark.runs
@pytest.mark.parametrize("warm_up", [False, True])
def test_sigterm_during_the_start_ends_it_with_a_word(recipe, warm_up: bool):
    words = ('env={ kind = "python", path = "tidemill.envs.spelling:score" }', "model=new:0.1m")
    more = (*words, "warmup.accuracy=1", "warmup.steps=1000000", "warmup.lr=1e-9") if warm_up else ()
    process = start(recipe, *more)
    wanted = lambda line: "warm-up: step" in line.get("text", "") if warm_up else line["kind"] == "header"  # noqa: E731
    lines_until(process, wanted)
    family = children(process.pid)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, out
    assert "SIGTERM: the run ends now, for no step is under way (the same command goes on later)" in out
    assert out.splitlines()[-1] == "interrupted; the same command goes on from what is recorded"
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, f"outlived their parent: {alive}"
    assert json.loads((recipe.parent / "run" / "failure.json").read_text())["kind"] == "CancelledError"


@pytest.mark.runs
def test_after_sigkill_the_same_command_goes_on_and_nothing_is_lost(recipe):
    process = start(recipe, "steps=14", "max_lag=3")
    lines_until(process, lambda line: line.get("kind") == "step" and line["step"] >= 6)
    family = children(process.pid)
    assert len(family) >= 2
    process.kill()
    process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, f"outlived their parent: {alive}"
    folder = recipe.parent / "run"
    before = conservation(folder)
    assert before["lost"] == 0 and before["trained"] >= 6 * 4
    assert before["pending"] > 0, "the kill was to leave groups without a fate"

    process = start(recipe, "steps=14", "max_lag=3")
    lines = finish(process)
    assert process.returncode == 0, lines
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    assert any("recorded steps again" in note for note in notes), "the kill left steps after the checkpoint of step 4"
    assert any(note.startswith("going on from step ") and note.endswith(" of 14") for note in notes)
    assert "eval/accuracy" in next(line for line in lines if line["kind"] == "step"), "known from before the kill"
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        lives = dict(db.execute("SELECT step, max(incarnation) FROM steps GROUP BY step").fetchall())
    assert lives[0] == 0 and lives[13] == 1, "a replayed step is a new incarnation"
    after = conservation(folder)
    assert after["trained"] == 14 * 4 and after["lost"] == after["trained_twice"] == after["pending"] == 0
    assert lines[-1]["max_lag_seen"] <= 3


@pytest.mark.runs
def test_ctrl_c_ends_after_the_step_with_a_checkpoint_and_the_run_goes_on(recipe):
    process = start(recipe, "steps=400")
    lines_until(process, lambda line: line.get("kind") == "step" and line["step"] >= 2)
    family = children(process.pid)
    process.send_signal(signal.SIGINT)
    lines = finish(process)
    assert process.returncode == 3, lines
    done = lines[-1]["steps"]
    assert 2 <= done < 400
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    folder = recipe.parent / "run"
    assert (folder / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()

    process = start(recipe, f"steps={done + 2}")
    lines = finish(process)
    assert process.returncode == 0, lines
    after = conservation(folder)
    assert after["trained"] == (done + 2) * 4 and after["lost"] == after["trained_twice"] == 0
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    assert not any("recorded steps again" in note for note in notes), "a checkpoint was taken when it was stopped"


@pytest.mark.runs
@pytest.mark.parametrize("kept", [True, False])
async def test_a_system_where_programs_can_outlive_the_run_is_told_of(tmp_path: Path, monkeypatch, kept: bool):
    class Begun(Exception): ...

    def begun(model: str) -> None:
        raise Begun

    notes = list[str]()
    display: Any = SimpleNamespace(note=notes.append, close=lambda: None)
    config = load_recipe([], ["placement=inline"], {"run_dir": str(tmp_path / "run"), "model": "new:0.1m", "env": "guess"})
    monkeypatch.setattr(keeper, "KEEPERS", kept)
    monkeypatch.setattr(session, "expect_model", begun)
    with pytest.raises(Begun):
        await session.run(config, display)
    assert notes.count(keeper.UNKEPT) == (not kept)
