"""Adapters of critics: PEFT's values and gradients; what is trained, saved and exported; reward models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.model_zoo import CONFIGS
from safetensors.torch import load_file
from test_critic import PPO, SETTINGS, rows
from trainer_cases import CPU, VOCAB, decoder, parameters, sample, value_model

from tidemill.algorithms.algorithm_settings import CriticSettings
from tidemill.core.errors import CheckpointError
from tidemill.core.types import LossSpec
from tidemill.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, BaseDtype
from tidemill.models.adapter_files import fill
from tidemill.models.hf_weights import SCORE, hf_views, save_folder
from tidemill.models.lora import adapter_blocks, adapters, attach
from tidemill.models.quantised_base import bases, load_served
from tidemill.models.value_model import ValueModel, load_value_model
from tidemill.run.roles import build_trainer
from tidemill.trainer import training_pass
from tidemill.trainer.companions import Critic
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings, TrainerSpec
from tidemill.weight_sync.sync_settings import SyncSettings

LORA = AdapterConfig(rank=3, alpha=6, base="a model")
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # model, PEFT's settings
    "every matrix": ("qwen3", {"r": 8, "lora_alpha": 32, "target_modules": EVERY}),
    "biases, rslora": ("llama3-biases", {"r": 9, "lora_alpha": 8, "target_modules": EVERY, "use_rslora": True}),
    "tied, two": ("qwen3-tied-bias", {"r": 2, "lora_alpha": 8, "target_modules": ["k_proj", "down_proj"]}),
}


def of_peft(name: str, folder: Path) -> Any:
    """PEFT's model for sequence classification, all of it random; its base, with another head, is saved in `folder`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shape, settings = SHAPES[name]
    fields = {key: value for key, value in CONFIGS[shape].items() if key != "model_type"}
    config = AutoConfig.for_model(CONFIGS[shape]["model_type"], **fields, num_labels=1)
    base = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in base.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
        base.save_pretrained(folder / "base")
        adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **settings))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.15, generator=generator)
    return adapted.eval()


def named(adapted: Any) -> dict[str, torch.nn.Parameter]:
    """PEFT's trained parameters, by the names that they have here."""
    found = {key: each for key, each in adapted.named_parameters() if each.requires_grad}
    without = (
        key.removeprefix("base_model.model.").replace("modules_to_save.", "").replace(".default", "") for key in found
    )
    return dict(zip(without, found.values(), strict=True))


def values_of(adapted: Any, tokens: np.ndarray) -> torch.Tensor:
    """The output [T] after each token; transformers returns the last one."""
    ids = torch.tensor(tokens).long()[None]
    scored = adapted.base_model.model
    values = scored.score(scored.model(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]
    assert torch.equal(values[-1:], adapted(input_ids=ids, use_cache=False).logits[0])
    return values


def judged(seed: int = 0) -> list[Any]:
    """Rows with returns, without a token that transformers skips."""
    rng, found = np.random.default_rng(seed), []
    for length in (3, 9, 6):
        row = sample(rng, rng.integers(2, VOCAB, 4), length)
        target = np.where(row.mask, rng.normal(size=row.mask.shape), 0).astype(np.float32)
        found.append(replace(row, tokens=np.maximum(row.tokens, 2), returns=target))
    return found


@pytest.mark.parametrize("name", SHAPES)
async def test_values_and_gradients_are_those_of_peft(name: str, tmp_path: Path) -> None:
    adapted = of_peft(name, tmp_path)
    critic, (_, settings) = load_value_model(tmp_path / "base"), SHAPES[name]
    how = {"rslora": settings.get("use_rslora", False), "targets": tuple(settings["target_modules"])}
    attach(critic.decoder, AdapterConfig(rank=settings["r"], alpha=settings["lora_alpha"], **how))
    theirs, rows = named(adapted), judged()
    fill(critic.decoder, {key: each for key, each in theirs.items() if key != SCORE}, "PEFT")
    with torch.no_grad():
        critic.head.weight.copy_(theirs[SCORE])

    policy = decoder(vocab_size=CONFIGS[SHAPES[name][0]]["vocab_size"])
    trainer = NativeTrainer(policy, SETTINGS, steps=8, critic=Critic(critic, SETTINGS, 8))
    for found, row in zip(await trainer.forward(rows, "critic"), rows, strict=True):
        expected = np.append(0, values_of(adapted, row.tokens).detach().numpy()[:-1])
        assert np.abs(found - expected)[row.mask].max() <= 1e-5 * max(1.0, np.abs(expected).max())

    training_pass.forward_backward(
        policy, rows, {"policy": LossSpec("value")}, training_pass.Compute(CPU, 500), critic=critic
    )
    total = torch.zeros(())
    for row in rows:
        target, weight = (torch.tensor(each[1:]) for each in (row.returns, row.weights))
        total = total + (weight * 0.5 * (values_of(adapted, row.tokens)[:-1] - target).square()).sum()
    total.backward()
    own = {p.data_ptr(): p.grad for p in critic.trained.parameters()}
    ours = {block.name: own[block.tensor.data_ptr()] for block in adapter_blocks(critic.decoder)}
    ours[SCORE] = critic.head.weight.grad
    assert ours.keys() == theirs.keys()
    for key, parameter in theirs.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        assert (ours[key] - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), key


def trainer(
    shared: bool, seed: int = 0, lora: AdapterConfig = LORA, scores: bool = False, moved: bool = False
) -> NativeTrainer:
    """A trainer of an adapter and a critic. seed: of adapters and head. moved: the critic's base is another one."""
    policy = decoder()
    attach(policy, lora, torch.Generator().manual_seed(seed))
    critic = ValueModel(policy, shared=True) if shared else ValueModel(decoder(seed=1))
    critic.head.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    if not shared:
        critic.decoder.norm.weight.data += float(moved)
        attach(critic.decoder, lora, torch.Generator().manual_seed(seed + 1))
    return NativeTrainer(policy, SETTINGS, steps=8, critic=Critic(critic, SETTINGS, 8), lora=lora, scores=scores)


def every(of: NativeTrainer) -> dict[str, torch.Tensor]:
    assert of._critic is not None
    return parameters(of.decoder, of._critic.model)


async def step(of: NativeTrainer, seed: int = 0) -> None:
    await of.forward_backward(rows(seed), PPO)
    await of.apply(0.1)


@pytest.mark.parametrize("shared", [False, True])
async def test_adapters_and_the_head_are_trained_alone(shared: bool) -> None:
    own = trainer(shared)
    before = {name: each.detach().clone() for name, each in every(own).items()}
    await own.forward_backward(rows(), PPO)
    reached = {name for name, each in every(own).items() if each.grad is not None}
    assert reached == {name for name in before if ".adapter." in name or name == "critic.head.weight"}
    assert any(name.startswith("critic.decoder.") for name in reached) is not shared
    await own.apply(0.1)
    await step(own, 1)  # B was 0 in the first one, so that A did not move
    assert {name for name, each in every(own).items() if not torch.equal(each, before[name])} == reached


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.runs
async def test_a_checkpoint_holds_adapters_and_head_and_goes_on_to_the_bit(
    tmp_path: Path, shared: bool, before: int
) -> None:
    first, second = trainer(shared), trainer(shared, seed=7)
    for number in range(before):
        await step(first, number)
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    held = load_file(tmp_path / "saved" / "optimizer.safetensors")
    assert all(".adapter." in name or name.endswith("head.weight") for name in held if not name.startswith("random."))
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    await step(first, 3)
    await second.load(str(tmp_path / "saved"))
    await step(second, 3)
    for name, value in every(first).items():
        assert torch.equal(value, every(second)[name]), name


async def test_a_critic_of_another_base_or_shape_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    first = trainer(False)
    await step(first)
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    for other, told in (
        (
            trainer(False, seed=7, moved=True),
            r"the critic's adapter was trained on a base with the fingerprint .* bring back",
        ),
        (trainer(False, seed=7, lora=replace(LORA, rank=4)), "this trainer has"),
        (trainer(True, seed=7), "do not belong here"),
    ):
        before = {name: each.detach().clone() for name, each in every(other).items()}
        with pytest.raises(CheckpointError, match=told):
            await other.load(str(tmp_path / "saved"))
        assert all(torch.equal(each, before[name]) for name, each in every(other).items())
    await trainer(False, seed=7).load(str(tmp_path / "saved"))


async def test_a_reward_model_is_exported_as_peft_merges_it(tmp_path: Path) -> None:
    """Folder and adapter are read by this project, by transformers and by PEFT, which all give the trainer's values."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    own, row = trainer(True, scores=True), judged()[0]
    for number in range(2):
        await step(own, number)
    await own.export(str(tmp_path / "final"))
    save_folder(decoder(), tmp_path / "base", tokenizer_from=None, dtype=torch.float32)
    (found,) = await own.forward([row], "critic")
    expected = found[row.mask]

    def said(of: Any) -> np.ndarray:
        prefixes = [torch.tensor(row.tokens[:n]).long()[None] for n in np.flatnonzero(row.mask)]
        return np.array([of(input_ids=each, use_cache=False).logits.item() for each in prefixes])

    def read(folder: Path) -> Any:
        how: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32, "num_labels": 1}
        return AutoModelForSequenceClassification.from_pretrained(folder, **how).eval()

    base = read(tmp_path / "base")
    config = json.loads((tmp_path / "final-adapter" / ADAPTER_CONFIG).read_text())
    assert config["task_type"] == "SEQ_CLS" and SCORE in "".join(load_file(tmp_path / "final-adapter" / ADAPTER_WEIGHTS))
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "final-adapter"))
    np.testing.assert_allclose(said(adapted), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(said(adapted.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(said(read(tmp_path / "final")), expected, rtol=1e-5, atol=1e-5)

    again = load_value_model(tmp_path / "final")
    assert own._critic is not None and torch.equal(again.head.weight, own._critic.model.head.weight)
    reader = NativeTrainer(decoder(), SETTINGS, steps=8, critic=Critic(again, SETTINGS, 8))
    (found,) = await reader.forward([row], "critic")
    np.testing.assert_allclose(found[row.mask], expected, rtol=1e-5, atol=1e-5)
    moved = {n for (n, a), (_, b) in zip(hf_views(again.decoder), hf_views(decoder()), strict=True) if not torch.equal(a, b)}
    assert moved == {f"{factor.module}.weight" for _, each in adapters(own.decoder) for factor in each.factors}


@pytest.mark.parametrize("base", ["float32", "nf4"])
async def test_it_is_built_from_a_spec_with_an_adapter_of_its_own(base: BaseDtype, tmp_path: Path) -> None:
    save_folder(decoder(), tmp_path / "policy", tokenizer_from=None, dtype=torch.float32)
    value_model(seed=4).save(tmp_path / "critic", tokenizer_from=None, dtype=torch.float32)
    lora = {"rank": 2, "targets": ["q_proj", "down_proj"], "base_dtype": base}
    settings, made = TrainerSettings.model_validate({"device": "cpu", "lora": lora}), list[NativeTrainer]()
    for model in (str(tmp_path / "critic"), "initial", "policy"):
        how: dict[str, Any] = {
            "trainer": settings,
            "steps": 8,
            "sync": SyncSettings(),
            "critic": CriticSettings(model=model),
        }
        spec = TrainerSpec(model=tmp_path / "policy", folder=tmp_path / f"slots-{len(made)}", **how)
        built = build_trainer(spec, offload=False)
        assert isinstance(built, NativeTrainer)
        made.append(built)
    own, initial, shared = (each._critic for each in made if each._critic is not None)

    ours, theirs = ({block.name: block for block in adapter_blocks(each)} for each in (own.model.decoder, made[0].decoder))
    assert ours.keys() == theirs.keys() and own.parameters.keys() < every(made[0]).keys()
    assert all(torch.equal(block.tensor, theirs[name].tensor) is ("lora_B" in name) for name, block in ours.items())
    count = 0 if base == "float32" else 2 * 4  # matrices of two layers
    assert [len([*bases(each)]) for each in (own.model.decoder, made[0].decoder)] == [count, count]
    assert torch.equal(own.model.head.weight, value_model(seed=4).head.weight)

    served = dict(hf_views(load_served(tmp_path / "policy", base)))
    assert all(torch.equal(view, served[name]) for name, view in hf_views(initial.model.decoder))
    assert not initial.model.head.weight.any() and initial.adapted is not None
    assert shared.model.shared and shared.adapted is None and sorted(shared.parameters) == ["critic.head.weight"]
    for each in made:
        await each.close()
