"""A step whose first groups were gone through early ends in the weights of one that was gone through at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from trainer_cases import VOCAB, decoder

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.train_step import Begun, train_on
from tidemill.core.types import Finish, Group, Score, Task, Trajectory
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

SETTINGS = {
    "grpo": {},
    "dr_grpo": {},
    "decoupled_ppo": {},
    "dapo": {"reference": {"kl": 0.1}},
}


def groups() -> list[Group]:
    rng, found = np.random.default_rng(0), []
    for number in range(5):
        prompt = rng.integers(0, VOCAB, 4)
        rows = []
        for sample in range(3):
            tokens = np.concatenate((prompt, rng.integers(0, VOCAB, int(rng.integers(2, 9))))).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            logprobs = np.where(mask, -3 - rng.random(len(tokens)), 0).astype(np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            score = Score(float(rng.random()))
            rows.append(Trajectory(tokens, mask, logprobs, versions, Finish.STOP, score, sample=sample))
        found.append(Group(number, Task(f"t{number}", "p"), rows))
    return found


async def stepped(name: str, parts: list[slice]) -> tuple[dict[str, torch.Tensor], dict[str, float], list[np.ndarray]]:
    model = decoder()
    settings = TrainerSettings(lr=1e-2, micro_batch_tokens=24, device="cpu")
    reference = None
    if "reference" in SETTINGS[name]:
        from tidemill.trainer.companions import Reference

        reference = Reference(copy.deepcopy(model))
    trainer = NativeTrainer(model, settings, steps=1, reference=reference)
    algorithm, every, begun = ConfiguredAlgorithm(AlgorithmSettings.preset(name, **SETTINGS[name]), 8), groups(), Begun()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for part in parts:
        await begun.add(trainer, algorithm, every[part], 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "nothing was applied"
    _, result, metrics = await train_on(trainer, algorithm, every, [], 1, begun=begun)
    await trainer.close()
    return {n: p.detach() for n, p in model.named_parameters()}, metrics | result.metrics, result.logprobs


@pytest.mark.parametrize("name", SETTINGS)
async def test_in_parts_it_ends_in_the_same_weights(name):
    weights, metrics, logprobs = await stepped(name, [])
    apart, again, said = await stepped(name, [slice(0, 2), slice(2, 3)])
    assert again.pop("streamed") == 3 and "streamed" not in metrics
    for n, value in weights.items():
        torch.testing.assert_close(apart[n], value, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == again.keys()
    for key, value in metrics.items():
        assert again[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for one, other in zip(said, logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
