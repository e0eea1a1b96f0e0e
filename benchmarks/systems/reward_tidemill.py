"""Tidemill on the demo's task, a checkpoint every few steps. See `harness.py` and `time_to_reward.py`.

A request is {"seed", "folder"}; the answer is the seconds up to each kept step, from the first task's admission on, and the
folders of the weights. Writing checkpoints is part of the run and counts.
"""

from __future__ import annotations

import importlib.metadata
import sqlite3
from contextlib import closing
from pathlib import Path

from serve import given, serve

import tidemill

wanted = given()


def answer(seed: int, folder: str) -> dict:
    run = Path(folder) / "run"
    tidemill.train(
        f"{Path(__file__).with_name('reward_task.py')}:score",
        wanted["model"],
        run_dir=run,
        quiet=True,
        seed=seed,
        steps=wanted["steps"],
        max_lag=wanted["max_lag"],
        rollout={"groups": wanted["groups"], "group_size": wanted["samples"], "max_tokens": wanted["tokens"]},
        trainer={"lr": wanted["lr"]},
        engine={"device": "cpu"},
        algorithm="grpo",
        eval={"every": 0, "tasks": 1, "final_tasks": 1},
        record={"checkpoint_every": wanted["every"], "checkpoints": 1, "keep_every": wanted["every"]},
    )
    with closing(sqlite3.connect(run / "ledger.sqlite", timeout=10)) as ledger:
        (begin,) = ledger.execute("SELECT min(admitted_at) FROM groups").fetchone()
        ends = dict(ledger.execute("SELECT step + 1, ended_at FROM steps"))
    kept = {int(path.name.rpartition("-")[2]): path for path in (run / "checkpoints").iterdir() if path.is_dir()}
    return {
        "seconds": {step: ends[step] - begin for step in sorted(kept) if step in ends},
        "folders": {step: str(path) for step, path in kept.items()},
    }


serve({"tidemill": importlib.metadata.version("tidemill"), "torch": importlib.metadata.version("torch")}, answer)
