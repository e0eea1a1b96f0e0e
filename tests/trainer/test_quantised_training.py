"""A trainer of an adapter on a base in few bits: its reference, publications, exports and checkpoints are of that base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_lora_training import step
from trainer_cases import batch, decoder

from tidemill.core.types import Version
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.models.adapter_files import load_adapter
from tidemill.models.adapter_update import base_version, factors_of, received_adapter
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder, load_slices
from tidemill.models.lora import attach, merge, merged_slices
from tidemill.models.quantised_base import quantise_base
from tidemill.models.quantised_weights import of_base, served_base
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice
from tidemill.trainer.companions import Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.shared_memory_transport import SharedMemoryReceiver, SharedMemorySender

BASES: list[BaseDtype] = ["nf4", "int8"]


def trainer(base: BaseDtype, folder: Path | None = None, alone: bool = False, **settings: object) -> NativeTrainer:
    policy, lora = decoder(), AdapterConfig(rank=3, alpha=6, targets=("q_proj", "down_proj"), base="x", base_dtype=base)
    quantise_base(policy, base)
    attach(policy, lora, torch.Generator().manual_seed(0))
    how = TrainerSettings.model_validate({"lr": 1e-2, "device": "cpu", **settings})
    sender, reference = SharedMemorySender(folder) if folder else None, Reference(policy, without_adapter=True)
    return NativeTrainer(policy, how, steps=8, lora=lora, reference=reference, sender=sender, adapter_alone=alone)


def served(base: BaseDtype) -> Decoder:
    """The model with the base's numbers, as an engine makes it of its folder."""
    model = decoder()
    load_slices(model, list(served_base([Slice.whole(name, view.clone()) for name, view in hf_views(model)], base)))
    return model


@pytest.mark.parametrize("base", BASES)
async def test_its_reference_is_the_quantised_model_and_only_the_adapter_is_trained(base: BaseDtype) -> None:
    own, plain, rows = trainer(base), NativeTrainer(served(base), TrainerSettings(device="cpu"), steps=8), batch()
    expected = await plain.forward(rows)
    exact = await NativeTrainer(decoder(), TrainerSettings(device="cpu"), steps=8).forward(rows)
    assert max(np.abs(a - b).max() for a, b in zip(exact, expected, strict=True)) > 1e-3, "quantised it is another model"
    for _ in range(2):
        await step(own)
        for ours, theirs in zip(await own.forward(rows, "reference"), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(hf_views(own.decoder), hf_views(served(base)), strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(await own.forward(rows), expected, strict=True)) > 1e-3
    assert all(".adapter." in name for name in own._optimizer.named)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engines_get_the_adapter_on_the_quantised_base(dtype: str, base: BaseDtype, tmp_path: Path) -> None:
    """Merged, the weights are those of the export; alone, the adapter names the base that an engine makes of its folder."""
    own = trainer(base, tmp_path, serving_dtype=dtype)
    await step(own)
    update = await own.publish(Version(1))
    received = {piece.name: piece.tensor.clone() for piece in SharedMemoryReceiver().receive(update)}
    await own.export(str(tmp_path / "final"))
    exported = dict(hf_views(load_folder(tmp_path / "final", getattr(torch, dtype))))
    assert all(torch.equal(exported[name], tensor) for name, tensor in received.items()) and set(exported) == set(received)
    held = dict(hf_views(served(base).to(getattr(torch, dtype))))
    moved = {name for name, tensor in received.items() if not torch.equal(tensor, held[name])}
    assert moved and all("q_proj" in name or "down_proj" in name for name in moved)
    await own.close()

    alone = trainer(base, tmp_path / "alone", alone=True, serving_dtype=dtype)
    await step(alone)
    update = await alone.publish(Version(1))
    engine = served(base).to(getattr(torch, dtype))
    assert update.base == base_version(Contents.of(engine, getattr(torch, dtype)).fingerprint)
    adapter = received_adapter(SharedMemoryReceiver().receive(update), update, "an engine")
    if dtype == "float32":  # in bfloat16 it is added to a rounded base
        summed = merged_slices((Slice.whole(*each) for each in hf_views(engine)), factors_of(engine, adapter))
        assert all(torch.equal(exported[piece.name], piece.tensor) for piece in summed)
    await alone.close()


@pytest.mark.parametrize("base", BASES)
async def test_the_export_and_its_adapter_are_on_the_quantised_base(tmp_path: Path, base: BaseDtype) -> None:
    own = trainer(base)
    await step(own)
    await own.export(str(tmp_path / "final"))
    model = served(base)
    assert load_adapter(model, tmp_path / "final-adapter").base_dtype == base
    merge(model)
    for (name, ours), (_, theirs) in zip(hf_views(model), hf_views(load_folder(tmp_path / "final")), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("base", BASES)
async def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_to_the_bit(tmp_path: Path, base: BaseDtype) -> None:
    first = trainer(base)
    await step(first)
    await first.snapshot()
    await step(first)
    await first.save(str(tmp_path / "saved"))
    assert AdapterConfig.from_folder(tmp_path / "saved").base_dtype == base
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    second = trainer(base)
    await second.load(str(tmp_path / "saved"))
    await step(second)
    for (name, ours), theirs in zip(second.decoder.named_parameters(), first.decoder.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not any(of_base(name) for name in dict(second.decoder.named_parameters()))
