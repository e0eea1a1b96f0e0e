"""The comparison behind `parity`, of models and of runs, and the doctor's self-test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tidemill.observability.diagnosis.mismatch import EXACT, SAME, Limit, LogprobComparison

RNG = np.random.default_rng(0)
NAN = float("nan")


def compared(*gaps: list[float], limit: Limit | None = SAME) -> LogprobComparison:
    found = LogprobComparison("paged", "engine - trainer", limit)
    for row in gaps:
        theirs = RNG.normal(-2, 1, len(row)).round(3)
        found.add(theirs + np.array(row), theirs)
    return found


def test_figures_are_those_of_all_rows_together():
    gaps = [RNG.normal(0, 1e-3, size).tolist() for size in (40, 1, 90)]
    found, sizes = compared(*gaps).figures(), np.abs(np.concatenate(gaps))
    assert (
        found["tokens"] == 131
        and found["max"] == pytest.approx(sizes.max())
        and found["mean"] == pytest.approx(sizes.mean())
    )
    assert found["p99"] == pytest.approx(np.quantile(sizes, 0.99, method="higher"), rel=0.03)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("gaps", "limit", "verdict"),
    [
        ([[0, 9e-5], [-9e-5]], SAME, "ok"),
        ([[0, 0], [-1.2e-4]], SAME, "FAILED"),
        ([[0, NAN]], SAME, "FAILED"),
        ([[float("inf")]], SAME, "FAILED"),
        ([[5.0]], None, "reported"),
        ([[0, 0]], EXACT, "ok"),
        ([[0, 1e-7]], EXACT, "FAILED"),
        ([[0.0] * 95 + [3e-4]], Limit(mean=1e-5, p99=1e-3), "ok"),
        ([[2e-5] * 95], Limit(mean=1e-5, p99=1e-3), "FAILED"),
        ([[0.0] * 40 + [2e-4]], Limit(mean=1e-5, p99=1e-4), "FAILED"),
    ],
)
def test_the_verdict(gaps: list[list[float]], limit: Limit | None, verdict: str):
    found = compared(*gaps, limit=limit)
    assert found.verdict == verdict and found.ok == (verdict != "FAILED")


def test_the_worst_token_is_named_with_what_both_sides_said():
    found = LogprobComparison("policy@v3", "recorded - trainer", SAME)
    found.add(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]), np.array([7, 9]), "group 4, trajectory 0")
    found.add(np.array([-1.0, -2.0]), np.array([-1.25, -2.0]), np.array([3, 4]), "group 5, trajectory 1")
    assert found.worst == "group 4, trajectory 0, at 9: -2 against -2.5"
    found.add(np.array([-1.0]), np.array([NAN]))
    assert found.worst == "row 2, at 0: -1 against nan" and found.gap.not_finite == 1
    assert LogprobComparison("nothing", "engine - trainer", SAME).figures()["worst"] is None
