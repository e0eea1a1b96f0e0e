"""The process that a run is started in: it never imports torch, which is as heavy as all else that it holds together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.runs

SCRIPT = """
import json, sys
from importlib.abc import Loader
from importlib.machinery import PathFinder

class Refused(Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ImportError("the controller imported torch")

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = Refused()
        return spec

sys.meta_path.insert(0, Refusing())
import tidemill

def reward(completions, answer, **kwargs):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]

rows = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefghij" for sign in "=:"]

if __name__ == "__main__":
    LONG, loaded = sys.argv[3] == "True", []
    for steps in (2, 3) if LONG else (2,):  # from the beginning, and on
        run = tidemill.train(
            env=reward, tasks=rows, model="new:0.1m", run_dir=sys.argv[1], steps=steps, quiet=True,
            rollout={"groups": 2, "group_size": 4, "max_tokens": 2}, eval={"every": 2, "tasks": 2, "final_tasks": 2},
            warmup={"accuracy": 0.05, "lr": 5e-3}, record={"checkpoint_every": 1, "probe_every": 1},
            algorithm={"name": "grpo", "reference": {"kl": 0.1}},
            callbacks=[lambda step, metrics: loaded.append([step, "torch" in sys.modules])],
        )
    taught = LONG and tidemill.train(
        env=reward, tasks=rows, model=run.final, run_dir=sys.argv[2], steps=1, quiet=True, profile=True,
        rollout={"groups": 2, "group_size": 4, "max_tokens": 2}, eval={"every": 0, "final_tasks": 2},
        algorithm={"name": "opd", "reference": {"model": str(run.final)}},
        callbacks=[lambda step, metrics: loaded.append([step, "torch" in sys.modules])],
    )
    print(json.dumps({"loaded": loaded, "complete": run.complete and (not LONG or taught.complete)}))
"""


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_makes_a_model_and_warms_it_up_and_one_that_goes_on_and_one_that_is_taught(long: bool, tmp_path: Path):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    command, environment = (
        [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "taught"), str(long)],
        os.environ | {"OMP_NUM_THREADS": "1"},
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["complete"] and {step for step, _ in told["loaded"]} >= ({1, 2, 3} if long else {1, 2})
    assert not any(loaded for _, loaded in told["loaded"])
