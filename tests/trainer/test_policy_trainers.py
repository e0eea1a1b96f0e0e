"""Several policies on one base: each is trained, published, saved and exported as if alone, and the base is held once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError, TrainingDiverged
from tidemill.core.interfaces import Progressing, Trainer
from tidemill.core.types import Sample, Version
from tidemill.core.weight_update import Rendezvous, WeightUpdate
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.models.adapter_files import load_adapter
from tidemill.models.adapter_update import base_version, folder_fingerprint, received_adapter
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.lora import adapter_blocks, attach, merge
from tidemill.models.quantised_base import bases, quantise_base
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import LiveSender, Sender
from tidemill.observability.timeline import IDLE
from tidemill.trainer.companions import Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.policy_trainers import PolicyTrainers, sharing
from tidemill.trainer.telemetry import Recorder
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

LORA = {
    "speller": AdapterConfig(rank=3, alpha=6, base="a model"),
    "adder": AdapterConfig(rank=2, alpha=8, targets=("q_proj", "down_proj"), base="a model"),
}
LR = {"speller": 1e-2, "adder": 3e-3}
STEPS = {"speller": 8, "adder": 3}
Senders = Mapping[str, Sender | LiveSender]


def settings(policy: str, **more: object) -> TrainerSettings:
    how = {"device": "cpu", "schedule": "cosine", "micro_batch_tokens": 60, "lr": LR[policy]}
    return TrainerSettings.model_validate(how | more)


def trainer_of(policy: str, base: Decoder, sender: Any = None, first: bool = True, **more: Any) -> NativeTrainer:
    """The trainer of one policy's adapter on this base."""
    how = {name: more.pop(name) for name in ("recorder", "offload") if name in more}
    lora = replace(LORA[policy], base_dtype=more.pop("base_dtype", "float32"))
    attach(base, lora, torch.Generator().manual_seed(0))
    given = {"lora": lora, "sender": sender, "adapter_alone": True, "policy": policy, **how}
    reference = Reference(base, without_adapter=True) if first else None
    return NativeTrainer(base, settings(policy, **more), steps=STEPS[policy], reference=reference, **given)


def alone(policy: str, sender: Any = None, **more: Any) -> NativeTrainer:
    return trainer_of(policy, base_of(more.get("base_dtype", "float32")), sender, **more)


def together(senders: Senders | None = None, base: Decoder | None = None, **more: Any) -> PolicyTrainers:
    base = base or base_of(more.get("base_dtype", "float32"))
    recorder, trainers = Recorder("trainer"), dict[str, NativeTrainer]()
    for name in LORA:
        own = {"recorder": recorder, "first": not trainers, "sender": senders and senders[name], **more}
        trainers[name] = trainer_of(name, sharing(base), **own)
    return PolicyTrainers(trainers, recorder)


def base_of(kind: BaseDtype) -> Decoder:
    base = decoder()
    if kind != "float32":
        quantise_base(base, kind)
    return base


def rows_of(policy: str, seed: int = 0) -> list[Sample]:
    return [replace(row, policy=policy) for row in batch(seed + 10 * list(LORA).index(policy))]


def mixed(seed: int = 0) -> list[Sample]:
    """The rows of both policies, in turns."""
    return [row for pair in zip(*(rows_of(policy, seed) for policy in LORA), strict=True) for row in pair]


def expect_same(ours: NativeTrainer, theirs: NativeTrainer) -> None:
    """Equal weights, moments and numbers of updates, to the bit."""
    named = dict(theirs.decoder.named_parameters())
    for name, parameter in ours.decoder.named_parameters():
        assert torch.equal(parameter, named.pop(name)), name
    assert not named and ours.updates == theirs.updates
    for one, other in zip(ours._optimizer.state(), theirs._optimizer.state(), strict=True):
        assert one.name == other.name and torch.equal(one.tensor, other.tensor), one.name


async def step(of: Trainer, rows: list[Sample], scale: float = 0.1) -> dict[str, float]:
    await of.forward_backward(rows, LOSSES)
    return await of.apply(scale)


@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
@pytest.mark.runs
async def test_each_is_trained_as_it_would_be_alone(base_dtype: BaseDtype) -> None:
    own, lone = together(base_dtype=base_dtype), {name: alone(name, base_dtype=base_dtype) for name in LORA}
    assert isinstance(own, Trainer) and isinstance(own, Progressing)
    for seed in range(3):
        every = mixed(seed)
        before, result = await own.forward(every), await own.forward_backward(every, LOSSES)
        metrics, sums = await own.apply(0.1), dict[str, float]()
        for place, (name, by_itself) in enumerate(lone.items()):
            rows = rows_of(name, seed)
            for found, expected in zip(before[place::2], await by_itself.forward(rows), strict=True):
                np.testing.assert_array_equal(found, expected)
            theirs = await by_itself.forward_backward(rows, LOSSES)
            for found, expected in zip(result.logprobs[place::2], theirs.logprobs, strict=True):
                np.testing.assert_array_equal(found, expected)
            sums = {key: sums.get(key, 0.0) + value for key, value in theirs.metrics.items()}
            applied = await by_itself.apply(0.1)
            assert {key: metrics[f"{name}/{key}"] for key in applied} == applied
            expect_same(own.trainers[name], by_itself)
        assert result.metrics == sums and sums["tokens"] > 0
        assert {key: value for key, value in metrics.items() if "/" not in key} == {
            key: max(metrics[f"{name}/{key}"] for name in LORA) for key in ("lr", "grad_norm")
        }
    both = [await own.forward([replace(row, policy=name) for row in rows_of("adder")]) for name in LORA]
    assert max(np.abs(a - b).max() for a, b in zip(*both, strict=True)) > 1e-3, "they are two policies by now"


@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
async def test_the_frozen_weights_are_the_same_objects(base_dtype: BaseDtype) -> None:
    base = base_of(base_dtype)
    own = together(base=base, base_dtype=base_dtype)
    one, other = (each.decoder for each in own.trainers.values())
    shared = dict(base.named_parameters())
    for model in (one, other):
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen.keys() == shared.keys() and all(p is shared[name] for name, p in frozen.items())
        assert all(a is b for a, b in zip(bases(model), bases(base), strict=True))
        assert all(".adapter." in name for name, p in model.named_parameters() if p.requires_grad)
    assert base_dtype == "float32" or next(bases(base), None) is not None
    trained = [{id(p) for p in model.parameters() if p.requires_grad} for model in (one, other)]
    assert trained[0] and trained[1] and not trained[0] & trained[1]
    held = {name: view.clone() for name, view in hf_views(base)}
    for _ in range(2):
        await step(own, mixed())
    assert all(torch.equal(held[name], view) for name, view in hf_views(base))


async def test_rows_of_another_policy_never_change_a_gradient() -> None:
    own, mine = together(), rows_of("adder")
    await own.forward_backward(mine, LOSSES)
    expected = gradients(own, "adder")
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0 and not gradients(own, "speller")
    await own.forward_backward(rows_of("speller", 3), LOSSES)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(own, "adder").items())
    again = together()
    await again.forward_backward([row for pair in zip(rows_of("speller", 7), mine, strict=True) for row in pair], LOSSES)
    found = gradients(again, "adder")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def gradients(of: PolicyTrainers, policy: str) -> dict[str, torch.Tensor]:
    named = of.trainers[policy].decoder.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


async def test_only_policies_with_a_gradient_take_a_step() -> None:
    own, lone = together(), alone("speller")
    await step(own, mixed())
    adder = {name: p.detach().clone() for name, p in own.trainers["adder"].decoder.named_parameters()}
    for seed in (1, 2):
        metrics = await step(own, rows_of("speller", seed))
        assert metrics.keys() == {"lr", "grad_norm", "speller/lr", "speller/grad_norm"}
        assert metrics["lr"] == metrics["speller/lr"]
    assert (own.trainers["speller"].updates, own.trainers["adder"].updates) == (3, 1)
    assert all(torch.equal(p, adder[name]) for name, p in own.trainers["adder"].decoder.named_parameters())
    for rows in (rows_of("speller"), rows_of("speller", 1), rows_of("speller", 2)):
        await step(lone, rows)
    expect_same(own.trainers["speller"], lone)
    assert await own.apply(0.1) == {} and own.trainers["speller"].updates == 3, "nothing has a gradient"
    nothing = await own.forward_backward([], LOSSES)
    assert nothing.metrics == {"loss": 0.0, "tokens": 0.0} and await own.apply(1.0) == {}


async def test_none_takes_a_step_when_the_gradient_of_one_is_not_finite() -> None:
    own, rows = together(), mixed()
    before = {name: [p.detach().clone() for p in each.decoder.parameters()] for name, each in own.trainers.items()}
    spoilt = next(row for row in rows if row.policy == "adder" and row.loss == "policy" and (row.advantages != 0).any())
    spoilt.advantages[spoilt.mask] = np.nan
    await own.forward_backward(rows, LOSSES)
    with pytest.raises(TrainingDiverged, match=r"of the policy 'adder', the gradient norm of update 0 is (nan|inf)"):
        await own.apply(0.1)
    for name, each in own.trainers.items():
        assert each.updates == 0
        assert all(torch.equal(a, b) for a, b in zip(before[name], each.decoder.parameters(), strict=True))


async def test_the_reference_is_the_base_for_every_policy() -> None:
    own, plain = together(), NativeTrainer(decoder(), settings("adder"), steps=1)
    await step(own, mixed())
    every = mixed(1)
    for found, expected in zip(await own.forward(every, "reference"), await plain.forward(every), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"this trainer was built without a critic; it has policy, reference"):
        await own.forward(every, "critic")


async def test_a_policy_that_is_not_trained_here_is_refused_by_name(tmp_path: Path) -> None:
    own = together({name: make_sender(SyncSettings(), tmp_path / name) for name in LORA})
    strange = [*mixed(), *rows_of("adder")[:1]]
    strange[-1].policy = "judge"
    told = "the policy 'judge': this trainer trains 'speller', 'adder' only"
    with pytest.raises(ValueError, match=told):
        await own.forward(strange)
    with pytest.raises(ValueError, match=told):
        await own.forward_backward(strange, LOSSES)
    assert not gradients(own, "speller") and not gradients(own, "adder") and await own.apply(1.0) == {}
    with pytest.raises(ValueError, match=told):
        await own.publish(Version(1, policy="judge"))
    with pytest.raises(ValueError, match="the policy 'policy': this trainer trains 'adder' only"):
        await own.trainers["adder"].publish(Version(1))
    update = await own.publish(Version(1, policy="adder"))
    with pytest.raises(ValueError, match=told):
        await own.send(replace(update, version=replace(update.version, policy="judge")))
    await own.close()


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "collective", "direct"])
async def test_each_is_published_by_a_sender_of_its_own(transport: str, tmp_path: Path) -> None:
    """Over several versions to one receiver, as an engine has it; with the fingerprint that it would have alone."""
    sync = SyncSettings.model_validate({"transport": transport})
    own = together({name: make_sender(sync, tmp_path / name) for name in LORA})
    lone = {name: alone(name, make_sender(SyncSettings(), tmp_path / f"{name} alone")) for name in LORA}
    receiver, base = make_receiver(transport), base_version(Contents.of(decoder(), torch.float32).fingerprint)
    for number in range(3):
        if number:
            await step(own, mixed(number))
        updates = {name: await own.publish(Version(number, policy=name)) for name in LORA}
        for name, update in updates.items():
            if number:
                await step(lone[name], rows_of(name, number))
            assert update.version == (await lone[name].publish(Version(number, policy=name))).version
            assert update.base == base and update.kind == "adapter"
            received = await brought(own, update, receiver)
            assert received.config.to_json() == replace(LORA[name], base="").to_json()
            held = {block.name: block.tensor for block in adapter_blocks(own.trainers[name].decoder)}
            assert held.keys() == received.tensors.keys()
            assert all(torch.equal(held[key], tensor) for key, tensor in received.tensors.items())
        assert len({update.version.fingerprint for update in updates.values()}) == 2
    receiver.close()
    for each in (own, *lone.values()):
        await each.close()


async def brought(own: PolicyTrainers, update: WeightUpdate, receiver: Any) -> Any:
    """What a receiver has of an update; live ones meet in one group, whosever they are."""
    if not update.live:
        return received_adapter(receiver.receive(update), update, "an engine")
    update = replace(update, rendezvous=Rendezvous("all engines", 1, 1, 60.0))
    receiving = asyncio.to_thread(lambda: received_adapter(receiver.receive(update), update, "an engine"))
    said, received = await asyncio.gather(own.send(update), receiving)
    assert said == ""
    return received


async def test_a_checkpoint_has_a_folder_for_each_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    first, second = together(), together()
    await step(first, mixed())
    await step(first, rows_of("speller", 1))
    await first.snapshot()
    await step(first, mixed(2))
    await first.save(str(tmp_path / "saved"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["adder", "speller"]
    await second.forward_backward(mixed(5), LOSSES)  # of which nothing is left
    await second.load(str(tmp_path / "saved"))
    assert await second.apply(1.0) == {}
    assert [each.updates for each in second.trainers.values()] == [2, 1]
    await step(second, mixed(2))
    for name in LORA:
        expect_same(second.trainers[name], first.trainers[name])
    with pytest.raises(CheckpointError, match="there is no snapshot to write"):
        await first.save(str(tmp_path / "again"))
    alone_again = alone("adder")
    await alone_again.load(str(tmp_path / "saved" / "adder"))
    assert alone_again.updates == 1


@pytest.mark.parametrize("damage", ["missing", "another"])
async def test_a_checkpoint_of_which_one_policy_does_not_fit_changes_none(tmp_path: Path, damage: str) -> None:
    saved, own = together(), together()
    await step(saved, mixed())
    await saved.snapshot()
    await saved.save(str(tmp_path / "saved"))
    (tmp_path / "saved" / "adder").rename(tmp_path / "aside")
    if damage == "another":
        (tmp_path / "saved" / "speller").rename(tmp_path / "saved" / "adder")
        (tmp_path / "aside").rename(tmp_path / "saved" / "speller")
    before = {name: [p.detach().clone() for p in each.decoder.parameters()] for name, each in own.trainers.items()}
    with pytest.raises(CheckpointError):
        await own.load(str(tmp_path / "saved"))
    for name, each in own.trainers.items():
        assert each.updates == 0
        assert all(torch.equal(a, b) for a, b in zip(before[name], each.decoder.parameters(), strict=True))


async def test_each_is_exported_merged_and_as_an_adapter(tmp_path: Path) -> None:
    own = together()
    await step(own, mixed())
    await own.export(str(tmp_path / "final"))
    names = ["adder", "adder-adapter", "speller", "speller-adapter"]
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == names
    for name in LORA:
        model = decoder()
        assert load_adapter(model, tmp_path / "final" / f"{name}-adapter").rank == LORA[name].rank
        held = {block.name: block.tensor for block in adapter_blocks(own.trainers[name].decoder)}
        assert all(torch.equal(block.tensor, held[block.name]) for block in adapter_blocks(model))
        merge(model)
        exported = load_folder(tmp_path / "final" / name)
        for (key, ours), (_, theirs) in zip(hf_views(model), hf_views(exported), strict=True):
            assert torch.equal(ours, theirs), key
    assert folder_fingerprint(tmp_path / "final" / "adder-adapter") != folder_fingerprint(
        tmp_path / "final" / "speller-adapter"
    )


async def test_the_process_is_told_of_once(tmp_path: Path) -> None:
    own = together({name: make_sender(SyncSettings(), tmp_path / name) for name in LORA})
    begun = own.progress()
    await step(own, mixed())
    updates = [await own.publish(Version(1, policy=name)) for name in LORA]
    first = await own.telemetry()
    names = [span.name for span in first.spans]
    assert first.process == "trainer" and (names.count("train"), names.count("publish")) == (2, 2)
    assert first.counters["updates"] == 2 and first.counters["trained_samples"] == len(mixed())
    assert first.counters["published_bytes"] == sum(update.bytes for update in updates)
    idle = [span for span in first.spans if span.name == IDLE]
    others = [span for span in first.spans if span.name in ("train", "apply", "publish")]
    assert not [(a, b) for a in idle for b in others if a.start < b.end and b.start < a.end], "idle while it worked"
    assert [span.name for span in (await own.telemetry()).spans if span.name != IDLE] == []
    assert own.progress() > begun
    await own.close()


async def test_it_sleeps_and_wakes_with_a_gradient() -> None:
    own, straight = together(), together()
    for each in (own, straight):
        await step(each, mixed())
        await each.forward_backward(mixed(1), LOSSES)
    await own.sleep()
    await own.wake()
    for each in (own, straight):
        await each.apply(0.1)
    for name in LORA:
        expect_same(own.trainers[name], straight.trainers[name])


def test_an_adapter_is_never_shared() -> None:
    base = decoder()
    attach(base, LORA["adder"])
    with pytest.raises(AssertionError, match="an adapter would be shared"):
        sharing(base)


@pytest.mark.gpu
async def test_the_frozen_weights_are_shared_on_a_device() -> None:
    before = torch.get_float32_matmul_precision()
    base = base_of("nf4")
    own = together(base=base, base_dtype="nf4", device="cuda", dtype="bfloat16")
    models = [each.decoder for each in own.trainers.values()]
    for frozen in zip(*([p for p in model.parameters() if not p.requires_grad] for model in models), strict=True):
        assert frozen[0] is frozen[1] and frozen[0].is_cuda
    for held in zip(*(list(bases(model)) for model in models), strict=True):
        assert held[0] is held[1] and all(buffer.is_cuda for buffer in held[0].buffers())
    metrics = await step(own, mixed())
    assert metrics["speller/grad_norm"] > 0 and metrics["adder/grad_norm"] > 0
    torch.set_float32_matmul_precision(before)
