"""`tidemill.train()` as a user's own script calls it."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

import tidemill
from tidemill.core.errors import ConfigError
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs

SCRIPT = """
import json, sys
import tidemill

def reward(completions, answer, **kwargs):          # TRL's signature, unchanged
    return [float(c.strip() == a) for c, a in zip(completions, answer)]

rows = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefghij" for sign in "=:"]

if __name__ == "__main__":
    seen = []

    def remember(step, metrics):
        if "reward/mean" in metrics:
            seen.append((step, metrics["reward/mean"]))

    def broken(step, metrics):
        raise RuntimeError("my dashboard is down")

    run = tidemill.train(
        env=reward, tasks=rows, model=sys.argv[1], run_dir=sys.argv[2], steps=3, quiet=True, placement=sys.argv[3],
        rollout={"groups": 2, "group_size": 4, "max_tokens": 2}, eval={"tasks": 2, "final_tasks": 2},
        callbacks=[remember, broken],
    )
    print(json.dumps({"seen": seen, "report": run.report, "complete": run.complete, "final": str(run.final)}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="abcdefghij=:\n ", context=32, **SIZES["0.1m"])
    return folder


def test_a_script_with_a_trl_reward_callbacks_and_a_sink_that_fails(tmp_path, model):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(model), str(tmp_path / "run"), "inline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["complete"] and [step for step, _ in told["seen"]] == [1, 2, 3]
    assert told["report"]["groups"]["trained"] == 6 and (Path(told["final"]) / "model.safetensors").exists()


UNGUARDED = """
import json, os, sys
import datasets
import tidemill

LETTERS = "abcdefghij"
seen = []

def right(completions, answer, **kwargs):
    return [float(said(c) == a) for c, a in zip(completions, answer)]

def said(completion):
    assert os.environ.get("TIDEMILL_WORKER"), "the scoring workers have the source"
    return completion[-1]["content"].strip()

def short(completions, prompts, **kwargs):          # keeps what it saw: it runs here
    seen.extend(prompts)
    return [None if len(p) > 1 else float(len(c[-1]["content"]) < 2) for c, p in zip(completions, prompts)]

rows = [{"prompt": [{"role": "user", "content": c + sign}], "answer": c} for c in LETTERS for sign in "=:"]
data = datasets.Dataset.from_list(rows).train_test_split(4, seed=0)
run = tidemill.train(
    env=[right, short], reward_weights=[0.75, 0.25], tasks=data, model=sys.argv[1], run_dir=sys.argv[2], steps=2,
    rollout={"groups": 2, "group_size": 4, "max_tokens": 2}, eval={"tasks": 4, "final_tasks": 4}, quiet=True,
)
print(run)
print(json.dumps({"seen": len(seen), "errors": run.report["judging"]["infra_errors"], "held_out": run.report["held_out"]}))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_with_a_list_of_rewards_and_a_dataset(tmp_path, model):
    script = tmp_path / "mine.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(model), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *summary, told = done.stdout.splitlines()
    assert summary[0] == f"run {tmp_path / 'run'}: 2 steps, done"
    assert "held-out accuracy 0." in summary[1] and "on 4 tasks (95 % CI 0." in summary[1]
    assert [line.partition(":")[0] for line in summary[2:]] == ["model", "next"]
    assert json.loads(told) == {"seen": 24, "errors": 0, "held_out": 4}  # 16 in two steps, 4 held-out ones twice
    assert [each.name for each in (tmp_path / "run" / "source").iterdir() if each.is_file()] == ["reward_right.py"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(step for step in reversed(steps) if "reward/mean" in step)
    assert last["reward/mean"] == pytest.approx(0.75 * last["reward/right"] + 0.25 * last["reward/short"], abs=1e-9)
    assert any("eval/reward.right" in step for step in steps)
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recipe["env"]["path"] == ["right:right", "short:short"] and recipe["env"]["reward_weights"] == [0.75, 0.25]
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        (parts,) = ledger.execute("SELECT parts FROM attempts WHERE reward IS NOT NULL").fetchone()
    assert set(json.loads(parts)) == {"right", "short"}


def test_what_does_not_fit_together_is_said(tmp_path, model):
    given = {"model": model, "run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="needs tasks"):
        tidemill.train(len, **given)
    with pytest.raises(ConfigError, match="tasks belong to a reward function"):
        tidemill.train("guess", tasks=[], **given)
    with pytest.raises(ConfigError, match="expected a name, an environment or a reward function"):
        tidemill.train(3, **given)
    with pytest.raises(ConfigError, match=r"needs env: expected train\(env=..., model=..., run_dir=..., ...\)"):
        tidemill.train(**given)
    with pytest.raises(ConfigError, match=r"unknown key 'reward_funcs'; here it is env=\[f, g\]"):
        tidemill.train(reward_funcs=[len], **given)
    with pytest.raises(ConfigError, match="reward_weights are of a list of reward functions"):
        tidemill.train(len, tasks=[], reward_weights=[1.0], **given)
    with pytest.raises(ConfigError, match="reward function 'len:len, exact' needs tasks"):
        tidemill.train([len, "exact"], **given)
    with pytest.raises(ConfigError, match="env is a list with a int"):
        tidemill.train([len, 3], tasks=[], **given)
    with pytest.raises(ConfigError, match="reward_weights has 1 weights, and path 2 rewards"):
        tidemill.train([len, "exact"], tasks=[], reward_weights=[1.0], **given)
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        tidemill.train("guess", stepz=3, **given)


def test_a_run_is_printed_in_a_few_lines():
    report = {"steps": 40, "accuracy_before": 0.1, "accuracy_after": 0.5, "held_out": 100, "unlearned": None}
    run = tidemill.Run(Path("runs/a"), 40, True, report)
    assert repr(run).splitlines() == [
        "run runs/a: 40 steps, done",
        "held-out accuracy 0.100 -> 0.500 on 100 tasks (95 % CI 0.404 to 0.596)",
        "model: runs/a/final (Hugging Face), .final here",
        "next: tidemill samples runs/a --worst 3  ·  tidemill serve runs/a",
    ]
    given = {"before": {"loss": 2.0}, "after": {"loss": 1.5}}
    learnt = tidemill.Run(Path("r"), 3, False, {"steps": 3, "accuracy_after": None, "held_out_given": given})
    assert repr(learnt).splitlines()[:2] == [
        "run r: 3 steps, stopped; the same call goes on",
        "held-out loss 2.000 -> 1.500",
    ]


async def test_in_a_running_loop_an_interruption_stops_the_run(tmp_path, model, monkeypatch):
    """As a notebook's: the loop is there, and Ctrl-C comes to the thread that waits."""
    from tidemill.run import api

    stopped = []

    async def endless(*_):
        begun.set()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 20)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    begun = threading.Event()

    def interrupted(*_):
        assert begun.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run", endless)
    monkeypatch.setattr(api, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tidemill.train(len, tasks=[], model=model, run_dir=tmp_path / "run")
    assert stopped == [True]


def test_importing_tidemill_offers_its_names():
    assert {"train", "environment", "Score", "InfraError", "Unscorable", "Task"} <= set(tidemill.__all__)
    assert all(getattr(tidemill, name) is not None for name in tidemill.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tidemill.nothing
