"""`tidemill drill` does what it says: faults happen, the run goes on, and the losses are counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import Run


@pytest.mark.slow
def test_a_drill_of_a_minute(tmp_path):
    run = Run(tmp_path, env="repeat", engines=2, zero_variance="keep")
    command = [sys.executable, "-m", "tidemill", "drill", str(run.recipe), "--minutes", "1.2", "--every", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["ok"] and len(outcome["faults"]) >= 2 and outcome["left"] == []
    assert outcome["groups"]["trained"] > 0 and outcome["groups"]["lost"] == outcome["groups"]["trained_twice"] == 0
    assert outcome["calm_rate"] > 0 and outcome["rate"] > 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "a drill begins a run of its own" in again.stderr
