"""A trainer of an adapter: what it changes, publishes, saves, exports; its reference is the model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError, PolicyMismatch
from tidemill.core.types import Version
from tidemill.models.adapter_config import ADAPTER_WEIGHTS, AdapterConfig
from tidemill.models.adapter_files import load_adapter
from tidemill.models.adapter_update import (
    ReceivedAdapter,
    base_version,
    config_block,
    factors_of,
    folder_fingerprint,
    received_adapter,
)
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.lora import adapter_blocks, attach, merge, merged_slices
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice
from tidemill.trainer.companions import Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender

LORA = AdapterConfig(rank=3, alpha=6, base="a model")


def trainer(
    seed: int = 0, folder: Path | None = None, lora: AdapterConfig = LORA, adapter_alone: bool = False, **settings: object
) -> NativeTrainer:
    policy = decoder(seed=seed)
    attach(policy, lora, torch.Generator().manual_seed(seed))
    how = TrainerSettings.model_validate({"lr": 1e-2, "device": "cpu", **settings})
    sender = None if folder is None else SharedMemorySender(folder)
    reference = Reference(policy, without_adapter=True)
    return NativeTrainer(policy, how, steps=8, lora=lora, reference=reference, sender=sender, adapter_alone=adapter_alone)


async def step(of: NativeTrainer) -> None:
    await of.forward_backward(batch(), LOSSES)
    await of.apply(0.1)


def base_of(of: NativeTrainer) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in hf_views(of.decoder)}


async def test_it_trains_the_adapter_alone_and_its_reference_is_the_model_without_it() -> None:
    own, plain = trainer(), NativeTrainer(decoder(), TrainerSettings(device="cpu"), steps=8)
    before, rows = base_of(own), batch()
    expected = await plain.forward(rows)
    for _ in range(2):
        await step(own)
        for ours, theirs in zip(await own.forward(rows, "reference"), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert all(torch.equal(before[name], view) for name, view in hf_views(own.decoder))
    changed = [np.abs(a - b).max() for a, b in zip(await own.forward(rows), expected, strict=True)]
    assert max(changed) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engines_get_the_merged_weights(dtype: str, tmp_path: Path) -> None:
    own = trainer(folder=tmp_path, serving_dtype=dtype)
    await step(own)
    update = await own.publish(Version(1))
    received = {piece.name: piece.tensor.clone() for piece in SharedMemoryReceiver().receive(update)}
    await own.export(str(tmp_path / "final"))
    exported = dict(hf_views(load_folder(tmp_path / "final", getattr(torch, dtype))))
    assert all(torch.equal(exported[name], tensor) for name, tensor in received.items()) and set(exported) == set(received)
    again = await own.publish(Version(2))
    assert again.version.fingerprint == update.version.fingerprint
    await step(own)
    assert (await own.publish(Version(3))).version.fingerprint != update.version.fingerprint
    await own.close()


async def test_the_exported_adapter_on_its_base_is_the_exported_model(tmp_path: Path) -> None:
    own = trainer()
    await step(own)
    await own.export(str(tmp_path / "final"))
    model = decoder()
    assert load_adapter(model, tmp_path / "final-adapter").base == "a model"
    merge(model)
    for (name, ours), (_, theirs) in zip(hf_views(model), hf_views(load_folder(tmp_path / "final")), strict=True):
        assert torch.equal(ours, theirs), name


async def test_a_checkpoint_holds_the_adapter_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    first = trainer()
    await step(first)
    await first.snapshot()
    await step(first)
    await first.save(str(tmp_path / "saved"))
    held = load_file(tmp_path / "saved" / ADAPTER_WEIGHTS)
    moments = [name for name in load_file(tmp_path / "saved" / "optimizer.safetensors") if not name.startswith("random")]
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    assert (
        len(moments) == 2 * len(held)
        and sum(t.numel() for t in held.values()) < 0.5 * first.decoder.embed.weight.numel() * 9
    )
    second = trainer()
    await second.load(str(tmp_path / "saved"))
    await step(second)
    for (name, ours), theirs in zip(second.decoder.named_parameters(), first.decoder.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


async def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    first = trainer()
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    policy = decoder()
    attach(policy, LORA, torch.Generator().manual_seed(0))
    policy.norm.weight.data[1] += 1
    second = NativeTrainer(policy, TrainerSettings(device="cpu"), steps=8, lora=LORA)
    with pytest.raises(CheckpointError, match=r"trained on a base with the fingerprint .*a model has .* now: bring back"):
        await second.load(str(tmp_path / "saved"))
    await trainer().load(str(tmp_path / "saved"))


async def test_an_adapter_alone_is_the_merged_weights_to_an_engine(tmp_path: Path) -> None:
    """What it brings, added to the base, are the weights that are exported; and only it travels."""
    own = trainer(folder=tmp_path, adapter_alone=True)
    await step(own)
    update = await own.publish(Version(1))
    received = received_adapter(SharedMemoryReceiver().receive(update), update, "an engine")
    await own.export(str(tmp_path / "final"))
    base = decoder()
    assert update.kind == "adapter" and update.base == base_version(Contents.of(base, torch.float32).fingerprint)
    summed = merged_slices((Slice.whole(*each) for each in hf_views(base)), factors_of(base, received))
    exported = dict(hf_views(load_folder(tmp_path / "final")))
    assert all(torch.equal(exported[piece.name], piece.tensor) for piece in summed)
    config = len(config_block(LORA).tensor)
    assert update.bytes == config + sum(p.nbytes for n, p in own.decoder.named_parameters() if ".adapter." in n)
    assert update.whole == update.bytes + sum(p.nbytes for p in base.parameters())
    assert folder_fingerprint(tmp_path / "final-adapter") == update.version.fingerprint
    await own.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda t: {**t, "model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(3, 4)},
            "up_proj.lora_A.weight belongs to no",
        ),
        (lambda t: {n: x for n, x in t.items() if n != min(t)}, "is missing"),
        (lambda t: {n: x[:2] for n, x in t.items()}, r"is \[2, \d+\], expected \[3, \d+\]"),
    ],
)
def test_an_adapter_of_another_model_is_named(change: Any, told: str) -> None:
    config, policy = AdapterConfig(rank=3, targets=("q_proj",)), decoder()
    attach(policy, config)
    tensors = {block.name: block.tensor.detach() for block in adapter_blocks(policy)}
    assert len(factors_of(decoder(), ReceivedAdapter(config, tensors))) == 2
    with pytest.raises(PolicyMismatch, match=told):
        factors_of(decoder(), ReceivedAdapter(config, change(tensors)))


async def test_another_adapters_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first = trainer()
    await step(first)
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    for other in (AdapterConfig(rank=4), AdapterConfig(rank=3, targets=("q_proj",))):
        second = trainer(lora=other)
        before = [p.detach().clone() for p in second.decoder.parameters()]
        with pytest.raises(CheckpointError):
            await second.load(str(tmp_path / "saved"))
        assert all(torch.equal(a, b) for a, b in zip(before, second.decoder.parameters(), strict=True))
    plain = NativeTrainer(decoder(), TrainerSettings(device="cpu"), steps=8)
    with pytest.raises(CheckpointError):
        await plain.load(str(tmp_path / "saved"))
