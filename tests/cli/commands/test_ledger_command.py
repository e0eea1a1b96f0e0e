"""`tidemill ledger`: the conservation figures under their exact names, and a status that tells a loss."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from tidemill.core.types import Task
from tidemill.ledger import SqliteLedger
from tidemill.run.storage.run_folder import read_json

KEYS = ["admitted", "trained", "dropped", "pending", "lost", "trained_twice"]


def test_the_figures_have_their_exact_names(tidemill, trained: Path):
    said = tidemill("ledger", trained, "--json")
    figures = json.loads(said.out)
    assert said.code == 0 and list(figures) == KEYS
    assert figures == read_json(trained / "report.json")["groups"]
    assert figures == {"admitted": 6, "trained": 6, "dropped": {}, "pending": 0, "lost": 0, "trained_twice": 0}


def test_what_a_person_reads(tidemill, trained: Path):
    out = tidemill("ledger", trained).out
    assert "6 admitted = 6 trained + 0 pending" in out and "conserved: 0 lost, 0 trained twice" in out
    assert "3 trained, the last one ended" in out and "4 published, the latest policy@v3" in out
    accuracy = read_json(trained / "report.json")["accuracy_after"]
    assert f"{accuracy:.3f} on 40 tasks after step 3" in out and "checkpoint: step 3" in out


def test_drops_by_reason_beside_a_live_run(tidemill, run: Path):
    with SqliteLedger(run, mode="open") as writer:
        for group_id, reason in enumerate(("zero_variance", "zero_variance", "unscored"), 6):
            writer.admit(group_id, Task(f"t{group_id}", "p"))
            writer.drop(group_id, reason)
        writer.admit(9, Task("t9", "p"))
        writer.replay_step(2, 1)
        said, person = tidemill("ledger", run, "--json"), tidemill("ledger", run).out
    figures = json.loads(said.out)
    assert said.code == 0 and figures["dropped"] == {"zero_variance": 2, "unscored": 1} and figures["pending"] == 1
    assert figures["admitted"] == figures["trained"] + sum(figures["dropped"].values()) + figures["pending"] == 10
    assert "10 admitted = 6 trained + 2 dropped (zero_variance) + 1 dropped (unscored) + 1 pending" in person
    assert "2 trained, step 3 was begun" in person and "1 recorded step was trained again" in person


def test_a_loss_is_a_failure(tidemill, run: Path):
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("DELETE FROM step_groups WHERE step = 1 AND place = 0")  # its gradient is in no weights
    db.close()
    said, person = tidemill("ledger", run, "--json"), tidemill("ledger", run)
    assert said.code == 1 == person.code and json.loads(said.out)["lost"] == 1
    assert "NOT conserved: 1 lost" in person.out


def test_what_is_left_out_is_counted_and_can_be_seen(tidemill, run: Path):
    assert "not shown" not in tidemill("ledger", run).out
    with SqliteLedger(run, mode="open") as writer:
        before = len(writer.events())
        for number in range(6):
            writer.event("engine_restarted", {"engine": f"engine-{number}", "after_s": 1.0})
        for step in range(4, 12):
            writer.evaluation(step, {"accuracy": 0.5, "n": 40.0})
    few, every = tidemill("ledger", run).out, tidemill("ledger", run, "--all").out
    assert few.splitlines()[-1] == f"  not shown: 4 evaluations, {before + 1} earlier events; --all shows them"
    assert "engine restarted: engine-5, after 1 s" in few and "engine-0," not in few
    assert few.count("tasks after step") == 6 and "not shown" not in every
    assert every.count("tasks after step") == 10 and all(f"engine-{number}, after 1 s" in every for number in range(6))
    assert "checkpoint: step 3" in every and json.loads(tidemill("ledger", run, "--all", "--json").out)["admitted"] == 6


def test_no_run_is_one_sentence(tidemill, tmp_path: Path):
    said = tidemill("ledger", tmp_path)
    assert said.code == 2 and "not a run folder" in said.out
