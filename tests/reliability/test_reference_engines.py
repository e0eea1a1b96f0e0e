"""An engine that serves the reference is lost in a run: what it was asked is asked again, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repeat_task import ALPHABET
from runs import Run

from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model

DEADLINE_S = 120.0


def taught(folder: Path, **given) -> tuple[Run, list[str]]:
    """A run of on-policy distillation, and what is to be added to its recipe for that."""
    run = Run(folder, zero_variance="keep", **given)
    teacher = folder / "teacher"
    if not teacher.exists():
        fresh_model(teacher, alphabet=ALPHABET, context=64, seed=5, **SIZES["0.1m"])
    algorithm = ["algorithm.name=opd", f"algorithm.reference.model={teacher}"]
    return run, [*algorithm, "placement.reference_engines=1"]


def lost(run: Run) -> list[str]:
    with SqliteLedger(run.folder, mode="read") as ledger:
        return [event.detail["engine"] for event in ledger.events("engine_lost")]


@pytest.mark.slow
def test_a_teacher_that_is_killed_is_started_again(tmp_path):
    """Once in its first step, and once more, frozen, after it had come back."""
    run, more = taught(tmp_path)
    faults = "reference:generate:0:kill reference:generate:*:stop"
    ended = run.train(faults, *more, limit_s=DEADLINE_S)
    assert ended.status == 0, ended.errors
    assert run.happened() == faults.split() and lost(run) == ["reference-0"] * 2
    run.check()


@pytest.mark.slow
def test_a_teacher_that_dies_again_and_again_ends_the_run(tmp_path):
    run, more = taught(tmp_path)
    faults = " ".join(f"reference:generate:*:kill:{i}" for i in range(4))
    ended = run.train(faults, *more, "supervise.restarts=2", limit_s=DEADLINE_S)
    assert ended.status == 1 and "reference-0" in ended.last_line and "started again 2 times" in ended.last_line, (
        ended.errors
    )
    run.check(complete=False)
    assert run.train("", *more).status == 0
    run.check()


@pytest.mark.slow
def test_recorded_steps_are_trained_again_with_the_teacher(tmp_path):
    """The trainer ends, and the steps since the checkpoint ask the teacher once more."""
    run, more = taught(tmp_path)
    ended = run.train("trainer:train:5:kill reference:generate:*:kill", *more, "supervise.resume=true", limit_s=DEADLINE_S)
    assert ended.status == 0, ended.errors
    notes = [line["text"] for line in ended.lines if line["kind"] == "note"]
    assert any("going on by itself" in note for note in notes)
    run.check()


@pytest.mark.slow
def test_a_deterministic_run_is_the_same_whatever_befalls_its_teacher(tmp_path):
    weights = []
    for number, faults in enumerate(("", "reference:generate:0:kill", "controller:train:5:kill")):
        run, more = taught(tmp_path / str(number), deterministic=True, max_lag=1)
        if run.train(faults, *more, limit_s=DEADLINE_S).status != 0:
            assert run.train("", *more, limit_s=DEADLINE_S).status == 0
        assert run.happened() == faults.split()
        run.check()
        weights.append(run.weights())
    assert weights[0] == weights[1] == weights[2]
    report = json.loads((run.folder / "config.json").read_text())
    assert report["deterministic"] and report["placement"]["reference_engines"] == 1
