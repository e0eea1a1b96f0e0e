"""The nouns refuse what would contradict itself."""

from __future__ import annotations

import numpy as np
import pytest
from test_codec import trajectory

from tidemill.core.attempt_checks import check_row
from tidemill.core.seeding import derive_seed
from tidemill.core.types import InfraError, SamplingParams, Score, Version


def test_a_score_is_finite():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            Score(value)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1},
        {"max_tokens": 0},
        {"top_logprobs": 21},
    ],
)
def test_sampling_params_name_the_bad_one(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_a_failure_is_never_a_number():
    assert np.isnan(trajectory(InfraError("x")).reward)


@pytest.mark.parametrize("field", ["logprobs", "versions", "mask"])
def test_check_finds_contradictions(field):
    row = trajectory(Score(1.0))
    check_row(row)
    broken = getattr(row, field).copy()
    broken[3] = {"logprobs": np.nan, "versions": 9, "mask": False}[field]
    setattr(row, field, broken)
    with pytest.raises(ValueError):
        check_row(row)


def test_versions_of_two_incarnations_differ():
    assert Version(3, 0) != Version(3, 1)
    assert str(Version(3, 1)) == "policy@v3.1"


def test_seeds_differ_by_every_part_and_never_by_process():
    seeds = {derive_seed(0, "rollout", g, s, t) for g in range(10) for s in range(8) for t in range(3)}
    assert len(seeds) == 240
    assert derive_seed(1, "a") != derive_seed("1", "a")
    assert derive_seed(0, "rollout", 1) == 8965486075198102113  # recorded: a change would change every run
