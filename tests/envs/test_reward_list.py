"""Several rewards of one attempt as one, by TRL's rule: None does not apply, the others count."""

from __future__ import annotations

import pytest

from tidemill.core.types import InfraError, Score, Unscorable
from tidemill.envs.reward_list import SeveralRewards, told_apart, weighted

NONE = Unscorable("f returned None")
LOST = InfraError("g raised")


@pytest.mark.parametrize(
    ("weights", "outcomes", "expected"),
    [
        ([1.0, 1.0], [Score(1.0), Score(0.5)], Score(1.5, {"f": 1.0, "g": 0.5})),
        ([0.7, -2.0], [Score(1.0), Score(0.5)], Score(-0.3, {"f": 1.0, "g": 0.5})),
        ([0.7, 2.0], [NONE, Score(0.5)], Score(1.0, {"g": 0.5})),
        ([0.0, 2.0], [Score(1.0), NONE], Score(0.0, {"f": 1.0})),
        ([1.0, 1.0], [NONE, Unscorable("g returned None")], Unscorable("f returned None; g returned None")),
        ([1.0, 1.0], [NONE, LOST], LOST),
        ([1.0, 1.0], [Score(1.0), LOST], LOST),
        (
            [0.5, 1.0],
            [Score(1.0, {"a": 0.25}, (1.0, 3.0)), Score(2.0, {}, (2.0,))],
            Score(2.5, {"f": 1.0, "g": 2.0, "f.a": 0.25}, (2.5, 1.5)),
        ),
    ],
)
def test_the_weighted_sum(weights, outcomes, expected):
    assert weighted(["f", "g"], weights, outcomes) == expected


def test_weights_that_add_up_to_1_reach_1():
    for weights in ([0.7, 0.2, 0.1], [1 / 3] * 3, [0.1] * 10, [0.6, 0.3, 0.1]):
        names = [str(i) for i in range(len(weights))]
        score = weighted(names, weights, [Score(1.0)] * len(weights))
        assert isinstance(score, Score) and score.value == 1.0


@pytest.mark.parametrize("pair", [(10.0, -10.0), (10.0, 0.0), (1.7, 1.7)])
def test_a_sum_that_is_no_number_is_no_score(pair):
    outcome = weighted(["f", "g"], [1e308, 1e308], [Score(value) for value in pair])
    assert outcome == InfraError("the weighted sum of f, g is no finite number")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([("score", "a"), ("form", "a")], ["score", "form"]),
        ([("score", "a"), ("score", "b")], ["a.score", "b.score"]),
        ([("score", ""), ("score", "")], ["score", "score-2"]),
        ([("mean", "a"), ("f", "a")], ["a.mean", "f"]),
        ([("mean", "")], ["mean-2"]),
    ],
)
def test_each_has_a_name_of_its_own(given, names):
    assert told_apart(given) == names


def test_the_rewards_that_alone_make_an_attempt_count_as_solved():
    (note,) = SeveralRewards([], ["f", "g"], [1.0, 0.2]).notes
    assert "which f alone may reach" in note
    assert SeveralRewards([], ["f", "g"], [0.8, 0.2]).notes == [] == SeveralRewards([], ["f"], [1.0]).notes
