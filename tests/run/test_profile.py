"""`profile = true`: a file that Perfetto opens, with every process's operators where its spans are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.observability import operator_profiler

pytestmark = pytest.mark.runs


def score(completion: str, answer: str) -> float:
    return float(completion.startswith(answer))


def run(place: Path, steps: int, **more: Any) -> None:
    fresh_model(place / "model", alphabet="abcdefgh=\n", context=32, **SIZES["0.1m"])
    tidemill.train(
        score,
        place / "model",
        tasks=[{"prompt": f"{c}=", "answer": c} for c in "abcdefgh"],
        run_dir=place / "run",
        steps=steps,
        quiet=True,
        profile=True,
        rollout={"groups": 2, "group_size": 4, "max_tokens": 8},
        eval={"every": 0, "tasks": 4, "final_tasks": 4},
        scoring={"accept": ["gold", "garbage"]},
        **more,
    )


def events(place: Path) -> list[dict[str, Any]]:
    with gzip.open(place / "run" / "profile.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


@pytest.mark.slow
def test_operators_of_each_process_lie_within_its_spans(tmp_path):
    run(tmp_path, 6)
    found = events(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    for role in ("trainer", "engine-0"):
        (spans,) = [pid for pid, name in names.items() if name.startswith(f"{role} (pid") and "operators" not in name]
        (own,) = [pid for pid, name in names.items() if name.startswith(f"{role} (pid") and name.endswith("operators")]
        busy = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["pid"] == spans and e["ph"] == "X"]
        operators = [e for e in found if e["pid"] == own and e["ph"] == "X" and e["name"].startswith("aten::")]
        inside = [any(a - 2000 <= e["ts"] and e["ts"] + e["dur"] <= b + 2000 for a, b in busy) for e in operators]
        outside = {e["name"] for e, within in zip(operators, inside, strict=True) if not within}
        assert len(operators) > 100 and sum(inside) > 0.9 * len(inside), (role, len(operators), sum(inside), outside)
        steps = {e["args"]["step"] for e in found if e["pid"] == spans and e["name"] in ("publish", "stage")}
        assert len(steps) >= operator_profiler.LAST
    assert not (tmp_path / "run" / "profile").exists()


def test_both_in_one_process_are_recorded_once(tmp_path):
    run(tmp_path, 5, placement={"kind": "inline", "environment": {"workers": 0}})
    found = events(tmp_path)
    (own,) = {e["pid"] for e in found if e["name"] == "process_name" and e["args"]["name"].endswith("operators")}
    names = {e["name"] for e in found if e["pid"] == own}
    of_engine = "aten::index_copy_"  # a prompt's last page for its siblings
    assert any("backward" in name.lower() for name in names) and of_engine in names


def test_a_run_that_was_too_short_leaves_none(tmp_path):
    run(tmp_path, 1, placement={"kind": "inline", "environment": {"workers": 0}})
    assert not (tmp_path / "run" / "profile.json.gz").exists()
    assert not operator_profiler._recording, "a profiler that nobody stops would go on in whatever this process does next"
