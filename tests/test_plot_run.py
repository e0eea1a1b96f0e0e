"""The picture of a run says in words what it shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
title = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "plot_run.py"))["title"]


@pytest.mark.parametrize(("seen", "old"), [(0, "0 versions old"), (1, "1 version old"), (2, "2 versions old")])
def test_a_stranger_can_read_the_title(seen: int, old: str) -> None:
    report = {"accuracy_before": 0.4976, "accuracy_after": 0.9463, "steps": 400, "max_lag_seen": seen, "max_lag_allowed": 3}
    assert title(report).splitlines() == [
        "held-out accuracy 0.498 → 0.946 in 400 steps",
        f"what was trained on was sampled by weights at most {old} (max_lag allows 3)",
    ]
