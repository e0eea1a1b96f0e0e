"""A critic beside the policy: its values, its gradient, an optimizer of its own, what a checkpoint holds of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_cases import CPU, VOCAB, assert_same, batch, decoder, gradients, parameters, sample, value_model

from tidemill.core.errors import CheckpointError, TrainingDiverged
from tidemill.core.types import LossSpec
from tidemill.models.attention import packed_attention
from tidemill.models.value_model import ValueModel
from tidemill.trainer import training_pass
from tidemill.trainer.companions import Critic
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

SETTINGS = TrainerSettings(lr=1e-2)
VALUE = LossSpec("value", {"clip": 0.2}, weight=0.5)
PPO = {"policy": LossSpec("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, also=(VALUE,))}


def rows(seed: int = 0) -> list:
    """Those of `batch` that are a policy's, with values and returns."""
    rng = np.random.default_rng(seed)
    found = [s for s in batch(seed) if s.loss == "policy"]
    for s in found:
        s.values, s.returns = (np.where(s.mask, rng.normal(size=s.mask.shape), 0).astype(np.float32) for _ in range(2))
    return found


def plain_values(critic: ValueModel, s) -> torch.Tensor:
    """[T - 1] before tokens 1 .."""
    tokens = torch.tensor(s.tokens).long()
    attend = packed_attention([len(tokens)], critic.decoder.arch.windows, CPU)
    return (critic.decoder(tokens, torch.arange(len(tokens)), attend) @ critic.head.weight[0])[:-1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_one_gradient_for_both_whatever_the_micro_batches_and_that_of_a_plain_loop(shared, dtype, tolerance):
    policy = decoder(dtype)
    critic = value_model(policy if shared else None, dtype=dtype)
    samples = rows()
    splits = ((10_000, samples), (40, samples[::-1]), (1, samples))
    found = [gradients(order, policy, budget, PPO, critic)[0] for budget, order in splits]
    gradients(samples, policy, losses={"policy": replace(PPO["policy"], also=())})
    for p in critic.trained.parameters():
        p.grad = None
    total = torch.zeros((), dtype=dtype)
    for s in samples:
        v = plain_values(critic, s)
        target, old, weight = (torch.tensor(x[1:]).to(dtype) for x in (s.returns, s.values, s.weights))
        near = old + (v - old).clamp(-0.2, 0.2)
        total = total + (weight * 0.25 * torch.maximum((v - target) ** 2, (near - target) ** 2)).sum()
    total.backward()
    expected = {n: p.grad for n, p in parameters(policy, critic).items()}
    for each in found:
        assert_same(each, expected, tolerance)


def test_a_head_on_the_policy_pulls_at_its_weights_and_a_critic_of_its_own_does_not():
    policy, samples = decoder(torch.float64), rows()
    for s in samples:
        s.advantages[:] = 0
    for shared in (True, False):
        critic = value_model(policy if shared else None, dtype=torch.float64)
        gradients(samples, policy, 100, PPO, critic)
        moved = max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None)
        assert (moved > 0) is shared


async def test_its_values_are_asked_for_by_name():
    critic = value_model()
    trainer = NativeTrainer(decoder(), SETTINGS, steps=8, critic=Critic(critic, SETTINGS, 8))
    samples = rows()
    for found, s in zip(await trainer.forward(samples, "critic"), samples, strict=True):
        expected = np.append(0, plain_values(critic, s).detach().numpy())
        np.testing.assert_allclose(found, np.where(s.mask | (s.weights != 0), expected, 0), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"forward\(policy='critic'\).* it has policy"):
        await NativeTrainer(decoder(), SETTINGS, steps=8).forward(samples, "critic")


async def test_it_has_a_learning_rate_and_a_clipping_of_its_own():
    slow = SETTINGS.model_copy(update={"lr": 1e-4, "max_grad_norm": 1e-3})
    trainer = NativeTrainer(decoder(), SETTINGS, steps=8, critic=Critic(value_model(), slow, 8))
    alone = NativeTrainer(decoder(), SETTINGS, steps=8)
    await trainer.forward_backward(rows(), PPO)
    await alone.forward_backward(rows(), {"policy": replace(PPO["policy"], also=())})
    said, plain = await trainer.apply(0.1), await alone.apply(0.1)
    assert said["lr"] == 1e-2 and said["critic/lr"] == 1e-4 and said["critic/grad_norm"] > 0
    assert said["grad_norm"] == plain["grad_norm"]
    for a, b in zip(trainer.decoder.parameters(), alone.decoder.parameters(), strict=True):
        assert torch.equal(a, b)


async def test_when_it_diverges_the_policy_takes_no_step_either():
    trainer = NativeTrainer(decoder(), SETTINGS, steps=8, critic=Critic(value_model(), SETTINGS, 8))
    samples = rows()
    samples[0].returns[samples[0].mask] = np.inf
    before = [p.detach().clone() for p in trainer.decoder.parameters()]
    await trainer.forward_backward(samples, {"policy": LossSpec("ppo_clip", also=(LossSpec("value"),))})
    with pytest.raises(TrainingDiverged, match="of the critic, the gradient norm of update 0"):
        await trainer.apply(0.1)
    assert trainer.updates == 0
    for a, b in zip(before, trainer.decoder.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.runs
async def test_a_run_that_goes_on_has_the_critic_it_had(tmp_path: Path, shared: bool, before: int):
    def make(seed: int) -> NativeTrainer:
        policy = decoder(seed=seed)
        critic = Critic(value_model(policy if shared else None, seed=seed + 1), SETTINGS, 8)
        return NativeTrainer(policy, SETTINGS, steps=8, critic=critic)

    async def train(of: NativeTrainer) -> None:
        await of.forward_backward(rows(), PPO)
        await of.apply(0.1)

    first, second = make(0), make(7)
    for _ in range(before):
        await train(first)
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    await train(first)
    await second.load(str(tmp_path / "saved"))
    await train(second)
    assert first._critic is not None and second._critic is not None
    a, b = (parameters(each.decoder, each._critic.model) for each in (first, second) if each._critic)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
    with pytest.raises(CheckpointError, match="tensors do not belong here"):
        await NativeTrainer(decoder(), SETTINGS, steps=8).load(str(tmp_path / "saved"))


def test_a_critic_that_reads_other_tokens_is_refused():
    critic = Critic(ValueModel(decoder(vocab_size=29)), SETTINGS, 8)
    with pytest.raises(ValueError, match="vocabulary of 29 tokens, the policy one of 23"):
        NativeTrainer(decoder(), SETTINGS, steps=8, critic=critic)


@pytest.mark.runs
def test_it_learns_what_it_is_shown():
    """A value that depends on the prompt's first token alone, within some hundred steps."""
    rng, critic = np.random.default_rng(0), ValueModel(decoder(seed=3))
    trained = Critic(critic, SETTINGS.model_copy(update={"lr": 3e-3}), 300)
    spec, errors = {"policy": LossSpec("value")}, []
    for _ in range(150):
        samples = []
        for first in rng.integers(0, VOCAB, 16):
            s = sample(rng, np.array([first, 3, 4]), 4)
            target = np.where(s.mask, np.float32(first % 2), 0)
            samples.append(replace(s, returns=target, values=s.logprobs, weights=s.mask.astype(np.float32)))
        result = training_pass.forward_backward(
            critic.decoder, samples, spec, training_pass.Compute(CPU, 500), critic=critic
        )
        errors.append(result.metrics["value_error"] / result.metrics["tokens"])
        trained.apply(1 / result.metrics["tokens"])
    assert errors[0] > 0.2 and np.mean(errors[-5:]) < 0.02, (errors[0], errors[-5:])
