"""Gradients under dropout: the same however rows are packed and whoever computes them; nothing else ever drops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_critic import PPO
from test_critic import rows as rows_of_critic
from test_streamed_steps import groups
from trainer_cases import CPU, LOSSES, TOLERANCE, assert_same, batch, decoder, gradients, sample, value_model

from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.prepare_step import ConfiguredAlgorithm
from tidemill.controller.policy_check import Agreement
from tidemill.controller.train_step import Begun, train_on
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Array, Group, TrainResult, Update, Version
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_dropout import Dropout
from tidemill.models.decoder import Decoder
from tidemill.models.lora import adapters, attach
from tidemill.trainer import parallel_micro_batches, training_pass
from tidemill.trainer.companions import Critic
from tidemill.trainer.micro_batches import pack, prefixes, rows_of, split
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.parallel_micro_batches import Lanes
from tidemill.trainer.trainer_kinds import LoraSettings, TrainerSettings

LORA = AdapterConfig(rank=3, alpha=6, dropout=0.3, base="a model")
UPDATE = Dropout(seed=1, update=5)


def adapted(dtype: torch.dtype = torch.float32, lora: AdapterConfig = LORA, seed: int = 0) -> Decoder:
    """A decoder with an adapter in which nothing is 0."""
    model, generator = decoder(dtype, seed=seed), torch.Generator().manual_seed(seed)
    attach(model, lora, generator)
    with torch.no_grad():
        for _, adapter in adapters(model):
            for b in adapter.b:
                b.normal_(0.0, 0.3, generator=generator)
    return model


def trainer(lora: AdapterConfig = LORA, seed: int = 0, policy: str = "policy", **settings: object) -> NativeTrainer:
    how = TrainerSettings.model_validate({"lr": 1e-2, "device": "cpu", "micro_batch_tokens": 60, **settings})
    return NativeTrainer(adapted(lora=lora), how, steps=8, lora=lora, seed=seed, policy=policy)


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    flat, reference = (torch.cat([grads[name].flatten() for name in one]) for grads in (one, other))
    return float((flat - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("checkpointing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("budget", [35, *(pytest.param(each, marks=pytest.mark.runs) for each in (60, 1))])
def test_micro_batches_do_not_matter(budget: int, checkpointing: float, dtype: torch.dtype) -> None:
    """Of 1 token: every attempt alone, so that no prompt is shared."""
    model, samples = adapted(dtype), batch()
    expected, whole = gradients(samples, model, dropout=UPDATE)
    found, result = gradients(samples, model, budget, dropout=UPDATE, checkpointing=checkpointing)
    assert_same(found, expected, TOLERANCE[dtype])
    assert result.metrics == pytest.approx(whole.metrics, rel=1e-5) and result.drops
    for one, other in zip(result.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert apart(gradients(samples, model)[0], expected) > 0.1, "it drops something"


def test_neither_order_nor_shared_prompts_nor_filling_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = adapted(torch.float64), batch()
    expected, _ = gradients(samples, model, dropout=UPDATE)
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    assert_same(gradients(shuffled, model, 60, dropout=UPDATE)[0], expected, 1e-10)
    lone = [replace(each, group=-1) for each in samples]
    assert_same(gradients(lone, model, dropout=UPDATE)[0], expected, 1e-10)
    monkeypatch.setattr("tidemill.trainer.micro_batches._WORTH", 2.0)  # no prefix is shared
    assert_same(gradients(samples, model, dropout=UPDATE)[0], expected, 1e-10)
    monkeypatch.setattr("tidemill.trainer.micro_batches._filling", lambda *_: [3, 2])
    assert_same(gradients(samples, model, dropout=UPDATE)[0], expected, 1e-10)


@pytest.mark.parametrize("choosing", [0.0, 2.0])
def test_whether_the_last_layer_computes_some_rows_only_does_not_matter(
    choosing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = adapted(torch.float64), batch()
    expected, _ = gradients(samples, model, dropout=UPDATE)
    monkeypatch.setattr("tidemill.trainer.micro_batches.WORTH_CHOOSING", choosing)
    assert_same(gradients(samples, model, 60, dropout=UPDATE)[0], expected, 1e-10)


@pytest.mark.parametrize("own_critic", [None, True, False])
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.runs)])
def test_lanes_do_not_matter(checkpointing: bool, own_critic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads run passes of one model at once, each with masks of its own rows."""
    monkeypatch.setattr(parallel_micro_batches, "LEAST", 1)
    model = adapted()
    critic = None if own_critic is None else value_model(None if own_critic else model)
    if critic is not None and own_critic:
        attach(critic.decoder, LORA, torch.Generator().manual_seed(3))
    samples = [row for seed in range(4) for row in (batch if critic is None else rows_of_critic)(seed)]
    losses = LOSSES if critic is None else PPO
    how = {"critic": critic, "losses": losses, "dropout": UPDATE}
    expected, _ = gradients(samples, model, 40, **how)
    for _ in range(3):
        side = Lanes(3)
        found, _ = gradients(samples, model, 120, **how, lanes=side, checkpointing=checkpointing)
        assert side.begun > 6
        assert_same(found, expected, 1e-5)


def test_one_calls_parts_add_up_to_the_whole() -> None:
    """As those of ranks do, and of a step that is gone through in parts."""
    model, samples = adapted(torch.float64), batch()
    expected, _ = gradients(samples, model, dropout=UPDATE)
    model.zero_grad()
    for i in range(4):
        training_pass.forward_backward(model, samples[i::4], LOSSES, training_pass.Compute(CPU, 50), dropout=UPDATE)
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected, 1e-10)


def test_updates_and_seeds_drop_other_inputs() -> None:
    model, samples = adapted(torch.float64), batch()
    expected, _ = gradients(samples, model, dropout=UPDATE)
    assert apart(gradients(samples, model, dropout=replace(UPDATE, update=6))[0], expected) > 0.1
    assert apart(gradients(samples, model, dropout=replace(UPDATE, seed=2))[0], expected) > 0.1


@pytest.mark.runs
def test_the_mean_over_many_updates_is_the_gradient_without_dropout() -> None:
    """Of one layer's last matrix, where the mean over masks is exact: nothing after it is bent."""
    lora = AdapterConfig(rank=2, alpha=2, targets=r"model\.layers\.1\.mlp\.down_proj", dropout=0.5)
    model = decoder(torch.float64)
    attach(model, lora, torch.Generator().manual_seed(0))  # B is 0: logprobs are the same under every mask
    samples, total = batch(), torch.zeros(())
    expected, plain = gradients(samples, model)
    name = next(name for name in expected if float(expected[name].abs().max()) > 0)
    for update in range(400):
        found, result = gradients(samples, model, dropout=Dropout(0, update))
        assert result.metrics == pytest.approx(plain.metrics)
        total = total + found[name]
    assert float((total / 400 - expected[name]).norm() / expected[name].norm()) < 0.15 < apart(found, expected)


def test_shared_tokens_have_their_hashes_and_padding_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.trainer.micro_batches._filling", lambda *_: [3, 2])
    rng = np.random.default_rng(0)
    samples = [sample(rng, np.arange(9), n) for n in (3, 7, 5)]
    (part,) = split([[row] for row in rows_of(samples)], 1000)
    packed = pack(part, CPU)
    found = prefixes(packed)
    assert len(found) == len(packed.tokens) == packed.families.tokens and sum(row.shared > 0 for row in part) == 2
    assert not found[-5:].any() and found[:-5].all()
    for i, row in enumerate(part):
        alone = prefixes(pack([replace(row, shared=0)], CPU))[: row.length]
        assert torch.equal(found[torch.from_numpy(packed.families.of_sequence(i))], alone)


async def test_a_trainer_drops_in_its_gradient_alone() -> None:
    """Logprobs and what it publishes are those of an adapter without dropout, which is trained to the bit as before."""
    own, plain, rows = trainer(), trainer(replace(LORA, dropout=0.0)), batch()
    unconfigured = NativeTrainer(adapted(lora=replace(LORA, dropout=0.0)), plain.settings, steps=8)
    for ours, theirs in zip(await own.forward(rows), await plain.forward(rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    dropped, usual = await own.forward_backward(rows, LOSSES), await plain.forward_backward(rows, LOSSES)
    assert dropped.drops and not usual.drops
    assert max(np.abs(a - b).max() for a, b in zip(dropped.logprobs, usual.logprobs, strict=True)) > 1e-2
    again = await unconfigured.forward_backward(rows, LOSSES)
    assert again.metrics == usual.metrics and not again.drops
    for (name, ours), theirs in zip(plain.decoder.named_parameters(), unconfigured.decoder.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad), name


async def _gradient(of: NativeTrainer) -> dict[str, torch.Tensor]:
    for p in of.decoder.parameters():
        p.grad = None
    await of.forward_backward(batch(), LOSSES)
    return {name: p.grad.clone() for name, p in of.decoder.named_parameters() if p.grad is not None}


async def test_each_update_seed_and_policy_has_masks_of_its_own() -> None:
    own = trainer()
    first = await _gradient(own)
    for other in (trainer(seed=1), trainer(policy="another")):
        samples = [replace(each, policy=other._policy) for each in batch()]
        await other.forward_backward(samples, LOSSES)
        assert apart({n: p.grad for n, p in other.decoder.named_parameters() if n in first}, first) > 0.1
    same = await _gradient(trainer())
    assert all(torch.equal(first[name], same[name]) for name in first)
    await own.apply(0.0)  # no weight moves
    assert apart(await _gradient(own), first) > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_a_checkpoint_goes_on_to_the_bit(checkpointing: bool, tmp_path: Path) -> None:
    async def step(of: NativeTrainer) -> None:
        await of.forward_backward(batch(), LOSSES)
        await of.apply(0.1)

    first = trainer(checkpointing=checkpointing)
    await step(first)
    await first.snapshot()
    await step(first)
    await first.save(str(tmp_path / "saved"))
    second = trainer(checkpointing=checkpointing)
    await second.load(str(tmp_path / "saved"))
    await step(second)
    for (name, ours), theirs in zip(second.decoder.named_parameters(), first.decoder.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


async def test_a_critic_with_an_adapter_is_trained_with_the_same_dropout() -> None:
    settings = TrainerSettings(lr=1e-2, device="cpu")

    async def gradient_of(dropout: float) -> tuple[bool, dict[str, torch.Tensor]]:
        lora, model = replace(LORA, dropout=dropout), value_model()
        attach(model.decoder, lora, torch.Generator().manual_seed(0))
        with torch.no_grad():
            for _, adapter in adapters(model.decoder):
                for b in adapter.b:
                    b.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
        of = NativeTrainer(adapted(lora=lora), settings, steps=8, lora=lora, critic=Critic(model, settings, 8))
        result = await of.forward_backward(rows_of_critic(), PPO)
        return result.drops, {n: p.grad for n, p in model.trained.named_parameters() if p.grad is not None}

    (drops, dropped), (never, plain) = await gradient_of(0.3), await gradient_of(0.0)
    assert drops and not never and dropped.keys() == plain.keys()
    assert apart(dropped, plain) > 0.05


def sampled_by(values: list[Array], found: list[Group]) -> list[Group]:
    """These groups as if an engine had sampled them with these logprobs, in the version 1."""
    rows = iter(values)
    for group in found:
        for t in group.trajectories:
            t.logprobs = np.where(t.mask, next(rows), 0).astype(np.float32)
            t.versions = np.where(t.mask, 1, -1).astype(np.int32)
            t.sources = (Version(1),)
    return found


async def trained(parts: int, checked: list[float]) -> list[np.ndarray]:
    """The logprobs that a step reports; what its check was given differs from what an engine said by `checked`."""
    own, found = trainer(replace(LORA, dropout=0.5)), groups()
    algorithm = ConfiguredAlgorithm(AlgorithmSettings.preset("grpo", old_logprobs="recompute"), 8)
    every = sampled_by(await own.forward(algorithm.rows(found, 1)), found)
    agreement, begun = Agreement(own, "float32"), Begun()

    async def before(update: Update, result: TrainResult) -> None:
        both = zip(update.samples, result.logprobs, strict=True)
        checked.append(max(float(np.abs(s.logprobs - values)[s.mask].max()) for s, values in both))
        await agreement(Version(1), every, update.samples, result.logprobs)

    for part in (every[:2], every[2:4]) if parts > 1 else ():
        await begun.add(own, algorithm, part, 1)
    _, result, _ = await train_on(own, algorithm, every, [], 1, before, begun)
    return [np.abs(s.logprobs - v)[s.mask] for s, v in zip(algorithm.rows(every, 1), result.logprobs, strict=True)]


@pytest.mark.parametrize("parts", [1, 3])
async def test_engines_are_held_against_logprobs_of_which_nothing_was_dropped(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of the pass that drops, the check would end the run."""
    checked = list[float]()
    assert max(gap.max() for gap in await trained(parts, checked)) < 1e-5 and checked[0] < 1e-5
    monkeypatch.setattr(Begun, "served", lambda passes, _: passes.logprobs)
    with pytest.raises(PolicyMismatch, match="engines and trainer hold the same weights and disagree"):
        await trained(parts, checked)
    assert checked[1] > 0.1


def test_a_start_folder_brings_its_dropout(tmp_path: Path) -> None:
    replace(LORA, dropout=0.25).write(tmp_path)
    assert LoraSettings(start=str(tmp_path)).config.dropout == 0.25
    assert LoraSettings(start=str(tmp_path), dropout=0.1).config.dropout == 0.1
    assert LoraSettings(start=str(tmp_path), dropout=0.0).config.dropout == 0.0
    assert LoraSettings().config.dropout == 0.0 and LoraSettings(dropout=0.4).config.dropout == 0.4
    for given in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="dropout"):
            LoraSettings(dropout=given)
