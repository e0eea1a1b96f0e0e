"""Where the time of a step went, in a real run with processes: at least 98 % of it has a name, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tidemill.models.new_model import SIZES, fresh_model
from tidemill.observability.time_breakdown import processes

pytestmark = pytest.mark.slow  # shares of time, beside whatever else the machine does

RECIPE = """
model = "{model}"
env = {{ kind = "guess", low = 1, high = 4, turns = 2 }}
steps = 5
max_lag = 1
placement = {{ engines = 2 }}
rollout = {{ groups = 8, group_size = 12, max_tokens = 24 }}
trainer.lr = 1e-6
eval = {{ every = 2, tasks = 4, final_tasks = 4 }}
record = {{ checkpoint_every = 3, probe_every = 2 }}
"""
NAMED = 0.98
LIMIT_S = 240


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the steps of a run said, in metrics.jsonl. They take a second or so each: a machine that does something else for
    a moment takes less than a hundredth of that."""
    from tidemill.envs.guess import ALPHABET

    folder = tmp_path_factory.mktemp("time")
    fresh_model(folder / "model", alphabet=ALPHABET, context=128, **SIZES["2m"])
    (folder / "recipe.toml").write_text(RECIPE.format(model=folder / "model"))
    command = [sys.executable, "-m", "tidemill", "train", str(folder / "recipe.toml"), f"run_dir={folder / 'run'}"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    shown = [line for line in ended.stdout.splitlines() if "trainer: " in line and "| engines: " in line]
    assert len(shown) >= 5, ended.stdout  # and the summary at the end
    return steps(folder / "run")


def steps(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "time/step_s" in line]


def test_at_least_98_percent_of_every_step_of_every_process_has_a_name(lines: list[dict]):
    for line in lines:
        told = processes(line)
        assert set(told) == {"controller", "trainer", "engine-0", "engine-1"}
        for process, kinds in told.items():
            named = sum(share for kind, share in kinds.items() if kind != "other")
            assert NAMED <= named <= 1 + 1e-6, (line["step"], line["time/step_s"], process, kinds)


def test_shares_are_of_the_time_between_steps_by_another_clock(lines: list[dict]):
    """metrics.jsonl has the time of day of each line: what is accounted for adds up to what has passed by it. A line is
    written when the slowest process has answered, which is not the same moment of every step, so all steps are looked at."""
    passed = lines[-1]["time"] - lines[0]["time"]
    assert sum(line["time/step_s"] for line in lines[1:]) == pytest.approx(passed, rel=0.05)
    for process in processes(lines[0]):
        told = [(line["time/step_s"], processes(line)[process]) for line in lines[1:]]
        named = sum(wall * share for wall, kinds in told for kind, share in kinds.items() if kind != "other")
        assert named >= (NAMED - 0.05) * passed, (process, named, passed)


def test_shares_are_of_this_step_alone(lines: list[dict]):
    """Not of the run until then: those of an evaluation are in the step that waited for it."""
    evaluated = [processes(line)["trainer"].get("wait for evaluation", 0.0) for line in lines]
    assert any(before > 0 and after == 0 for before, after in pairwise(evaluated)), evaluated


def test_what_was_done_is_named(lines: list[dict]):
    for line in lines:
        told = processes(line)
        assert told["trainer"]["train"] > 0 and told["controller"]["ledger"] > 0 and line["time/reward"] >= 0
    for kind in ("generate", "sync"):
        assert all(any(processes(line)[f"engine-{i}"].get(kind, 0.0) > 0 for line in lines) for i in (0, 1))
    assert any(processes(line)["trainer"].get("sync", 0.0) > 0 for line in lines)
