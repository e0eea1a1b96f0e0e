"""The entropy's weight: the rule, at golden numbers; and that a run which goes on has the weight that it would have had."""

from __future__ import annotations

import json

import pytest
from test_prepare import LONGEST, group, trajectory

from tidemill.algorithms.algorithm_settings import AlgorithmSettings, adaptive_entropy
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.cli.commands.explain import parts_of


def algorithm(**entropy):
    return ConfiguredAlgorithm(AlgorithmSettings.preset("grpo", entropy=entropy), LONGEST)


def step(of, number, nats):
    """The weight of the entropy's term in a step whose tokens were sampled with a mean logprob of -nats; its metrics."""
    rows = [trajectory(reward, 3, sample=i) for i, reward in enumerate((1.0, 0.0))]
    for row in rows:
        row.logprobs[row.mask] = [-nats / 2, -nats, -nats * 3 / 2]
    groups = [group(*rows)]
    prepared = of.prepare(groups, number, of.rows(groups, number), {})
    return sum(each.weight for each in prepared.losses["policy"].also if each.name == "entropy"), prepared.metrics


@pytest.mark.parametrize(
    ("coefficient", "measured", "then"),
    [(0.0, 0.1, 0.005), (0.01, 0.1999, 0.015), (0.01, 0.2, 0.005), (0.01, 0.3, 0.005), (0.004, 0.3, 0.0), (0.0, 9.0, 0.0)],
)
def test_the_rule(coefficient, measured, then):
    assert adaptive_entropy(coefficient, measured, target=0.2) == pytest.approx(then, abs=1e-15)
    assert adaptive_entropy(0.5, 0.1, target=0.2, change=0.25) == 0.75


def test_it_weighs_from_the_step_after_the_entropy_fell_and_only_while_it_is_low():
    of = algorithm(target=0.6, change=0.25)
    entropies = [0.5, 0.4, 0.4, 0.75, 0.5, 0.75, 0.75, 0.75, 0.5]
    weights = [step(of, number, nats)[0] for number, nats in enumerate(entropies)]
    assert weights == [0, 0.25, 0.5, 0, 0.5, 0, 0, 0, 0]  # 0.75 + 0.25 - 0.25 ... ; above the target it does not weigh
    assert step(algorithm(coefficient=0.3), 0, 0.5) == (0.3, step(algorithm(coefficient=0.3), 7, 0.5)[1])


def test_it_begins_where_it_is_told_to():
    of = algorithm(target=0.6, change=0.25, coefficient=1.0)
    assert [step(of, number, 0.5)[0] for number in range(3)] == [1.0, 1.25, 1.5]


def test_a_run_that_goes_on_has_the_same_weights():
    """From what the ledger recorded, as it reads it; and steps that are done again change nothing."""
    entropies = [0.3, 0.4, 0.4, 0.6, 0.45, 0.3, 0.45, 0.7, 0.2, 0.4, 0.6, 0.3]
    one, recorded, weights = algorithm(target=0.5, change=0.003), {}, []
    for number, nats in enumerate(entropies):
        weight, metrics = step(one, number, nats)
        weights.append(weight)
        recorded[number] = json.loads(json.dumps(metrics))
    assert len({*weights}) > 5
    for saved in (1, 4, 11):
        other = algorithm(target=0.5, change=0.003)
        other.recall(lambda number: recorded.get(number, {}))
        assert [step(other, number, entropies[number])[0] for number in range(saved, 12)] == weights[saved:]
        other.recall({number: recorded[number] for number in range(saved)}.__getitem__)
        assert step(other, saved, entropies[saved])[0] == weights[saved]
    fresh = algorithm(target=0.5, change=0.003)
    assert [step(fresh, number, entropies[number])[0] for number in range(4, 12)] != weights[4:], (
        "nothing was to be recalled"
    )


def test_what_does_not_apply_is_refused():
    with pytest.raises(ValueError, match="change does not apply without a target"):
        algorithm(change=0.1)
    with pytest.raises(ValueError, match="is never below 0"):
        algorithm(target=0.2, coefficient=-0.1)
    with pytest.raises(ValueError, match=r"entropy\.target does not apply to given = 'answers'"):
        AlgorithmSettings.preset("sft", entropy={"target": 0.2})
    assert AlgorithmSettings.preset("grpo", entropy=0.01).entropy.coefficient == 0.01
    assert AlgorithmSettings.preset("grpo", entropy=-1).loss_spec().also[0].weight == -1


def test_it_is_explained():
    named = {part.name: part for part in parts_of(AlgorithmSettings.preset("grpo", entropy={"target": 0.2}), 10)}
    assert named["adaptive_entropy"].constants == {"target": 0.2, "change": 0.005} and "entropy" not in named
