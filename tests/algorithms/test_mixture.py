"""Algorithms of several environments in one step: what each prepares is what it would alone, and how it is put together."""

from __future__ import annotations

import numpy as np
import pytest
from test_prepare import LONGEST, STEP, group, trajectory

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.mixture import COMMON, Mixture, algorithm_of
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.types import Finish, Group, Sample

GRPO, DAPO, DR = (AlgorithmSettings.preset(name) for name in ("grpo", "dapo", "dr_grpo"))


def of(env: str, *trajectories, id: int) -> Group:
    made = group(*trajectories, id=id)
    made.task.env = env
    return made


def step(algorithm, groups, **logprobs: float):
    rows = algorithm.rows(groups, STEP)
    known = {who: [row.logprobs + delta * row.mask for row in rows] for who, delta in logprobs.items()}
    return algorithm.prepare(groups, STEP, rows, known)


def mixed(count: int = 2) -> list[Group]:
    """Groups of "a" and of "b", in turns; in the step there is one of "a" more."""
    groups = []
    for i in range(count):
        groups.append(of("a", trajectory(1.0, 2, sample=0), trajectory(0.0, 5, sample=1), id=2 * i))
        groups.append(
            of("b", trajectory(1.0, 3, sample=0), trajectory(1.0, 4, sample=1), trajectory(0.0, 1, sample=2), id=2 * i + 1)
        )
    return [*groups, of("a", trajectory(0.0, 4, sample=0), trajectory(1.0, 1, sample=1), id=99)]


def factor(prepared, sample: Sample) -> np.ndarray:
    """[T] what multiplies each token's term in the gradient, its advantage apart."""
    return prepared.updates[0].scale * prepared.losses[sample.loss].weight * sample.weights.astype(np.float64)


@pytest.mark.parametrize("names", [("a", "b"), (COMMON, "b"), ("a", COMMON)])
def test_each_share_is_its_groups_of_what_it_would_be_alone(names):
    settings, groups = dict(zip(names, (DAPO, DR), strict=True)), mixed()
    whole = step(Mixture(settings, LONGEST), groups)
    assert len(whole.updates) == 1 and whole.updates[0].samples is whole.samples and len(whole.samples) == 12
    for env, own_settings in zip("ab", settings.values(), strict=True):
        own = [g for g in groups if g.task.env == env]
        alone = step(ConfiguredAlgorithm(own_settings, LONGEST), own)
        ids = {g.id for g in own}
        mine = [s for s in whole.samples if s.group in ids]
        assert len(mine) == len(alone.samples) and len({s.loss for s in mine}) == 1
        spec = whole.losses[mine[0].loss]
        assert (spec.name, spec.params) == (alone.losses["policy"].name, alone.losses["policy"].params)
        for one, other in zip(mine, alone.samples, strict=True):
            np.testing.assert_array_equal(one.advantages, other.advantages)
            np.testing.assert_array_equal(one.weights, other.weights)
            expected = len(own) / len(groups) * factor(alone, other)
            np.testing.assert_allclose(factor(whole, one), expected, rtol=1e-15)


def test_an_environment_that_a_step_lacks_changes_nothing():
    groups = [g for g in mixed() if g.task.env == "b"]
    whole, alone = step(Mixture({"a": DAPO, "b": DR}, LONGEST), groups), step(ConfiguredAlgorithm(DR, LONGEST), groups)
    assert whole.updates[0].scale == alone.updates[0].scale and set(whole.losses) == {"policy/b"}
    assert whole.losses["policy/b"].weight == 1.0


def test_groups_are_dropped_by_their_own_algorithm():
    mixture = Mixture({"a": DAPO, COMMON: GRPO}, LONGEST)
    assert mixture.drop_reason(of("a", 1.0, 1.0, id=0)) == "zero-variance"
    assert mixture.drop_reason(of("b", 1.0, 1.0, id=0)) is None


def test_logprobs_go_to_those_who_ask_for_them():
    recompute = AlgorithmSettings.preset("grpo", old_logprobs="recompute")
    held = AlgorithmSettings.preset("grpo", reference={"kl": 0.1})
    mixture = Mixture({"a": recompute, "b": held}, LONGEST)
    assert mixture.asks == ("policy", "reference")
    whole = step(mixture, mixed(), policy=-0.25, reference=-1.0)
    for sample in whole.samples:
        assert (sample.old_logprobs is not None, sample.ref_logprobs is not None) == (
            (True, False) if sample.loss == "policy/a" else (False, True)
        )
    sample = next(s for s in whole.samples if s.old_logprobs is not None)
    assert sample.old_logprobs is not None
    np.testing.assert_allclose(sample.old_logprobs[sample.mask], sample.logprobs[sample.mask] - 0.25)


def test_a_step_without_a_trained_token_has_scale_0():
    settings = AlgorithmSettings.preset("grpo", overlong="mask")
    cut = [
        of(env, trajectory(1.0, finish=Finish.LENGTH), trajectory(0.0, finish=Finish.LENGTH), id=i)
        for i, env in enumerate("ab")
    ]
    whole = step(Mixture({"a": settings, "b": GRPO}, LONGEST), cut[:1])
    assert whole.updates[0].scale == 0.0 and whole.losses["policy/a"].weight == 0.0
    half = step(Mixture({"a": settings, "b": GRPO}, LONGEST), cut)
    assert half.updates[0].scale == 0.25 and half.losses["policy/a"].weight == 0.0, "what one lacks does not go to the other"


def test_figures_are_of_the_step_and_of_each():
    metrics = step(Mixture({"a": DAPO, COMMON: DR}, LONGEST), mixed()).metrics
    assert (metrics["groups"], metrics["samples"], metrics["completion_tokens_max"]) == (5, 12, 5)
    assert metrics["reward"] == pytest.approx((3 + 4) / 12) and metrics["a/reward"] == 0.5 and metrics["a/groups"] == 3
    assert not any(key.startswith("/") for key in metrics)


def test_one_algorithm_is_no_mixture():
    assert isinstance(algorithm_of({COMMON: DAPO}, LONGEST), ConfiguredAlgorithm)
    assert isinstance(algorithm_of({"a": DAPO, "b": DAPO}, LONGEST), Mixture)
