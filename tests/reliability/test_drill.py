"""`tidemill drill` does what it says: faults happen, the run goes on, and the losses are counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import Run

from tidemill.drill import Life, Size


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


def test_growth_is_between_the_medians_of_two_windows():
    def looks(minutes: float) -> list[tuple[float, Size]]:
        ages = [2.0 * i for i in range(int(30 * minutes) + 1)]
        return [(age, Size(100 + age / 60 + 50 * (i % 3 == 0), 10 + (age > 200))) for i, age in enumerate(ages)]

    grown = Life.of("trainer", [*looks(10), (601.0, Size(3.0, 0))])  # it was ending when it was seen last
    assert grown.early is not None and grown.early.resident_mb == pytest.approx(102.25, abs=0.2) and grown.early.files == 10
    assert grown.late.resident_mb == pytest.approx(109.75, abs=0.2) and grown.late.files == 11
    assert grown.grown == pytest.approx(7.5 / 102.25, abs=0.003)
    young = Life.of("trainer", looks(2.9))
    assert young.early is None and young.grown is None and young.late.resident_mb == pytest.approx(102.6, abs=0.2)
    assert Life.of("engine", [(0.0, Size(5.0, 3))]).late == Size(5.0, 3)
