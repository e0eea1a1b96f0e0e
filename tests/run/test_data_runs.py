"""Whole runs in an order of tasks and with several environments: the figures, and what a run that goes on knows.

The reward is found by its file in worker processes, so nothing of other tests is imported here.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidemill
from tidemill.core.errors import ConfigError, PeerDied
from tidemill.envs.curriculum import Curriculum
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run import build_controller
from tidemill.run.task_source import remembered
from tidemill.trainer.native_trainer import NativeTrainer

pytestmark = pytest.mark.runs

ALPHABET = "abcdefgh=:0123456789\n"


def score(completion: str, answer: str) -> float:
    return float(completion.startswith(answer))


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefgh"[:count] for sign in "=:0123456789"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet=ALPHABET, context=32, **SIZES["0.1m"])
    return folder


def run(model: Path, folder: Path, steps: int, count: int = 8, **more: Any) -> tidemill.run.api.Run:
    settings: dict[str, Any] = {
        "rollout": {"groups": 4, "group_size": 4, "max_tokens": 1},
        "eval": {"every": 0, "tasks": 4, "final_tasks": 4},
        "record": {"checkpoint_every": 0, "trace": False, "probe_every": 0},
        "placement": {"kind": "inline", "environment": {"workers": 0}},
        "scoring": {"accept": ["gold", "garbage"]},
    }
    env = more.pop("env", score)
    tasks = {} if isinstance(env, list) else {"tasks": rows(count)}
    return tidemill.train(env, model, run_dir=folder, steps=steps, quiet=True, **tasks, **settings | more)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_in_an_order_by_difficulty_goes_on_and_knows_its_tasks(model, tmp_path):
    data = {"order": "frontier", "retire": 1.0}
    run(model, tmp_path / "run", 4, data=data)
    with pytest.raises(ConfigError, match=r"the tasks are not those that .* was begun with"):
        run(model, tmp_path / "run", 8, data=data, count=2)
    ended = run(model, tmp_path / "run", 8, data=data, count=8)
    assert ended.complete and ended.report["groups"]["trained"] == 32 and ended.report["groups"]["lost"] == 0
    steps = [line for line in lines(tmp_path / "run") if "data/seen" in line]
    seen = [line["data/seen"] for line in steps]
    assert len(steps) == 8 and seen == sorted(seen), "it remembers what it gave before"
    with pytest.raises(ConfigError, match=r"data\.order was 'frontier' and is 'shuffled'"):
        run(model, tmp_path / "run", 9, data={"order": "shuffled"})


def test_after_a_loss_of_its_trainer_a_run_knows_its_tasks_and_has_not_read_its_record_again(model, tmp_path, monkeypatch):
    """Reading takes seconds and much memory when a run is old: what it remembers must be what it would have read."""
    known, updates, apply = [], itertools.count(), NativeTrainer.apply

    async def lost_once(self, scale):
        if next(updates) == 2:
            raise PeerDied("trainer", "killed by SIGKILL")
        return await apply(self, scale)

    monkeypatch.setattr(build_controller, "remembered", lambda *given: known.append(remembered(*given)) or known[-1])
    monkeypatch.setattr(NativeTrainer, "apply", lost_once)
    data = {"order": "frontier", "retire": 1.0}
    ended = run(model, tmp_path / "run", 6, data=data, seed=3, supervise={"resume": True})
    (curriculum,) = known
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        assert ended.complete and ledger.incarnation() == 1 and ledger.counts().trained == 24
        (own,), (read,) = curriculum._parts, remembered(Curriculum(curriculum._tasks, 3, **data), ledger)._parts
    for name in ("given", "rates", "retired", "_away", "_latest", "_rounds", "_recent"):
        ours, theirs = (getattr(each.pool, name) for each in (own, read))
        if name == "_recent":  # groups that finished in another order lie in other places
            ours, theirs = ([sorted(map(tuple, rows)) for rows in each] for each in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs, name)
    assert own.pool.given.sum() >= 24


@pytest.mark.slow
def test_figures_are_told_for_each_environment(model, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(completion, answer):\n    return float(completion.startswith(answer))\n\n"
        "tasks = [{'prompt': c + s, 'answer': c} for c in 'abcdefgh' for s in '=:0123456789']\n\n"
        "def wrong(completion, answer):\n    return 0.0 * len(completion)\n"
    )
    env = [
        {"kind": "python", "path": f"{tmp_path}/mine.py:score", "name": "letters", "weight": 3, "algorithm": "dr_grpo"},
        {"kind": "python", "path": f"{tmp_path}/mine.py:wrong", "name": "never"},
    ]
    ended = run(model, tmp_path / "run", 6, env=env, eval={"every": 3, "tasks": 8, "final_tasks": 8})
    assert ended.complete and ended.report["groups"]["trained"] == 24
    told = lines(tmp_path / "run")
    evaluated = [line for line in told if "eval/never/accuracy" in line]
    assert len(evaluated) == 3 and all((line["eval/letters/n"], line["eval/never/n"]) == (6, 2) for line in evaluated)
    assert {line["eval/never/accuracy"] for line in evaluated} == {0.0}
    steps = [line for line in told if "lag/mean" in line]
    assert {line["reward/never"] for line in steps if "reward/never" in line} == {0.0}
    assert max(line["reward/letters"] for line in steps if "reward/letters" in line) > 0
    assert sum(line["train/letters/groups"] for line in steps) == 18
    with SqliteLedger(tmp_path / "run", mode="read") as ledger:
        envs = [env for _, env, _, _ in ledger.history()]
        assert envs == ["letters", "letters", "never", "letters"] * 6
        assert ledger.evaluations()[-1].metrics["letters/n"] == 6
