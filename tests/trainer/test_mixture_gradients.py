"""I6 of several algorithms in one step: its gradient is the sum of theirs alone, each by its share of the groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_gradients import CPU, TOLERANCE, assert_same
from trainer_cases import VOCAB, decoder

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.mixture import Mixture
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.core.types import Finish, Group, Score, Task, Trajectory, Version
from tidemill.trainer import training_pass

SETTINGS = {
    "a": AlgorithmSettings.preset("dapo"),
    "b": AlgorithmSettings.preset("gspo", entropy=0.01),
    "c": AlgorithmSettings.preset("grpo", reference={"kl": 0.3}, old_logprobs="recompute"),
}
LONGEST, AT = 12, 5


def groups() -> list[Group]:
    """Of three environments, in turns and in different numbers; "a" and "b" share prompts."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB, n) for n in (6, 3, 4)]
    return [_group(rng, i, env, prompts[i % 3]) for i, env in enumerate("abcaabacab")]


def _group(rng: np.random.Generator, number: int, env: str, prompt: np.ndarray) -> Group:
    found = []
    for sample in range(3):
        n = int(rng.integers(2, LONGEST))
        tokens = np.concatenate([prompt, rng.integers(0, VOCAB, n)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.where(mask, -np.log(VOCAB) - 0.3 * rng.random(len(tokens)), 0).astype(np.float32)
        reward = Score(float(rng.integers(0, 3)) if sample else 3.0)
        found.append(Trajectory(tokens, mask, logprobs, np.where(mask, 4, -1), Finish.STOP, reward, (Version(4),), sample))
    return Group(number, Task(f"t{number}", "?", env=env), found)


def gradient(model, algorithm, those, budget: int) -> dict[str, torch.Tensor]:
    """Of one step: what `train_on` does, with the model's own logprobs where they are asked for."""
    compute = training_pass.Compute(CPU, budget)
    rows = algorithm.rows(those, AT)
    known = {who: training_pass.forward(model, rows, compute) for who in algorithm.asks}
    prepared = algorithm.prepare(those, AT, rows, known)
    model.zero_grad()
    (update,) = prepared.updates
    training_pass.forward_backward(model, update.samples, prepared.losses, compute)
    return {name: update.scale * p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("budget", [10_000, 60, 25, 1])
def test_the_gradient_is_the_sum_of_the_shares_whatever_the_micro_batches(dtype, budget):
    model, every = decoder(dtype), groups()
    expected: dict[str, torch.Tensor] = {}
    for env, settings in SETTINGS.items():
        own = [each for each in every if each.task.env == env]
        for name, part in gradient(model, ConfiguredAlgorithm(settings, LONGEST), own, 10_000).items():
            expected[name] = expected.get(name, 0) + len(own) / len(every) * part
    assert_same(gradient(model, Mixture(SETTINGS, LONGEST), every, budget), expected, TOLERANCE[dtype])


def test_the_order_of_the_groups_does_not_matter():
    model, every = decoder(torch.float64), groups()
    expected = gradient(model, Mixture(SETTINGS, LONGEST), every, 10_000)
    assert_same(gradient(model, Mixture(SETTINGS, LONGEST), every[::-1], 10_000), expected, 1e-10)


def test_the_same_algorithm_twice_is_no_single_one_unless_its_mean_is_over_groups():
    """What is compared over a step is compared within an environment; a mean over prompts is the same either way."""
    model, every = decoder(torch.float64), groups()
    twice = {env: AlgorithmSettings.preset("dapo", reduction="prompt") for env in "abc"}
    alone = gradient(model, ConfiguredAlgorithm(twice["a"], LONGEST), every, 10_000)
    assert_same(gradient(model, Mixture(twice, LONGEST), every, 10_000), alone, 1e-6)
    token = {env: replace_reduction(each) for env, each in twice.items()}
    with pytest.raises(AssertionError):
        assert_same(
            gradient(model, Mixture(token, LONGEST), every, 10_000),
            gradient(model, ConfiguredAlgorithm(token["a"], LONGEST), every, 10_000),
            1e-6,
        )


def replace_reduction(settings: AlgorithmSettings) -> AlgorithmSettings:
    return settings.model_copy(update={"reduction": "token"})
