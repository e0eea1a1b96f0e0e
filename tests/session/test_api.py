"""`tidemill.train()` as a user's own script calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill
from tidemill.errors import ConfigError
from tidemill.models.fresh import SIZES, fresh_model

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


@pytest.mark.parametrize("placement", ["inline", "local"])
def test_a_script_with_a_trl_reward_callbacks_and_a_sink_that_fails(placement, tmp_path, model):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(model), str(tmp_path / "run"), placement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["complete"] and [step for step, _ in told["seen"]] == [1, 2, 3]
    assert told["report"]["groups"]["trained"] == 6 and (Path(told["final"]) / "model.safetensors").exists()


def test_what_does_not_fit_together_is_said(tmp_path, model):
    given = {"model": model, "run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="needs tasks"):
        tidemill.train(len, **given)
    with pytest.raises(ConfigError, match="tasks belong to a reward function"):
        tidemill.train("guess", tasks=[], **given)
    with pytest.raises(ConfigError, match="expected a name, an environment or a reward function"):
        tidemill.train(3, **given)
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        tidemill.train("guess", stepz=3, **given)


def test_importing_tidemill_offers_its_names():
    assert {"train", "environment", "Score", "InfraError", "Unscorable", "Task"} <= set(tidemill.__all__)
    assert all(getattr(tidemill, name) is not None for name in tidemill.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tidemill.nothing
