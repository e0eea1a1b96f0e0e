"""Moments in 8 bits and moments that leave the device: what they cost, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_cases import LOSSES, batch, decoder, value_model

from tidemill.models.hf_weights import hf_views
from tidemill.trainer import moments, native_trainer
from tidemill.trainer.companions import Critic
from tidemill.trainer.moments import EightBitMoments, Moments, decoded, encoded
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.optimizer import MOMENTS, Optimizer
from tidemill.trainer.trainer_kinds import TrainerSettings

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}  # some matrices are large enough for 8 bits
HOW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "device": "cpu", "micro_batch_tokens": 60}


def filled(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** torch.randint(-6, 1, (1,), generator=generator)


def stepped(settings: TrainerSettings, steps: int = 4) -> tuple[list[Tensor], Optimizer]:
    model = decoder(**SIZES)
    optimizer = Optimizer(model, settings, updates=9)
    for step in range(steps):
        filled(model, step)
        optimizer.apply(0.5)
    return [p.detach().clone() for p in model.parameters()], optimizer


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("power", [-30, -20, -16, -14, -12, -3, 0, 8, 18])
def test_what_was_decoded_is_encoded_to_the_same_bits_again(signed: bool, power: int):
    rng = np.random.default_rng(power + 40)
    spread = 10.0 ** rng.uniform(-9, 0, (40, 256)) * rng.choice([-1.0, 1.0], (40, 256))
    values = torch.tensor(spread * 10.0**power, dtype=torch.float32)
    values[3], values[4, 1:], values[5, :200] = 0.0, 0.0, 0.0
    values = (values if signed else values.abs()).view(-1)[:-100]
    codes, scales = encoded(values, signed)
    found = decoded(codes, scales, signed)
    held = found if signed else found.square().sqrt()  # a second moment is kept as its root
    again = encoded(held.view(-1), signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    large = scales > 1e-15
    blocks = torch.nn.functional.pad(values, (0, 100)).view(-1, 256)
    assert torch.equal(found.abs().amax(1)[large], blocks.abs().amax(1)[large]), "the largest is kept exactly"
    if not large.any():
        assert power <= -15, "too small for its square to be a number"
        return
    error = (found - blocks).abs()[large] / scales[large, None]
    assert error.max() < (0.00704 if signed else 0.00352), "half of the coarsest step"
    nonzero = (blocks.abs() > 1e-4 * scales[:, None]) & large[:, None]
    assert ((found - blocks).abs() < 0.5 * blocks.abs())[nonzero].all(), "numbers far below the largest are not lost"


def test_a_parameter_costs_two_bytes_and_a_thirtieth():
    shapes = {name: torch.empty(size) for name, size in (("matrix", 333_000), ("odd", 4097), ("small", 4095), ("norm", 64))}
    made = moments.made_for(shapes, TrainerSettings(moments="int8"))
    sizes = {name: sum(t.nbytes for t in each.held) / shapes[name].numel() for name, each in made.items()}
    assert sizes["matrix"] < 2.04 and sizes["odd"] < 2.2 and sizes["small"] == sizes["norm"] == 8
    large = torch.empty(151_936, 64)
    assert sum(t.nbytes for t in EightBitMoments(large).held) <= 2.1 * large.numel()


def test_it_takes_the_steps_of_float32_but_for_its_rounding():
    exact, _ = stepped(TrainerSettings(**HOW))
    close, optimizer = stepped(TrainerSettings(**HOW, moments="int8"))
    before = [p.detach() for p in decoder(**SIZES).parameters()]
    kinds = {type(each) for each in optimizer._moments.values()}
    assert kinds == {Moments, EightBitMoments}
    for was, now, other, held in zip(before, exact, close, optimizer._moments.values(), strict=True):
        moved, off = (now - was).norm(), (now - other).norm()
        assert off < (0.05 * moved if isinstance(held, EightBitMoments) else 1e-12)


@pytest.mark.parametrize("eight", [True, False])
def test_parts_that_are_stepped_one_after_another_change_no_bit(eight: bool, monkeypatch: pytest.MonkeyPatch):
    """As moments on the host are: float32 ones to the bits that a step of all has, whatever the size of a part."""
    settings = TrainerSettings(**HOW, moments="int8" if eight else "float32")
    whole, _ = stepped(settings)
    monkeypatch.setattr(moments, "PIECE", 512)
    monkeypatch.setattr(Moments, "whole", False)
    parts, _ = stepped(settings)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_on_the_host_they_lie_in_one_block(monkeypatch: pytest.MonkeyPatch):
    asked = list[tuple[int, str]]()

    def block(likes: list[Tensor], device: torch.device) -> list[Tensor]:
        asked.append((len(likes), device.type))
        return [torch.zeros(like.shape, dtype=like.dtype) for like in likes]

    monkeypatch.setattr(moments, "host_tensors", block)
    on_device = {name: torch.empty(80, 80, device="meta") for name in "ab"}
    made = moments.made_for(on_device, TrainerSettings(moments_on="host"))
    assert asked == [(4, "meta")] and all(t.is_cpu for each in made.values() for t in each.held)
    assert not any(each.whole for each in made.values()), "their parts are copied to the device and back"
    moments.made_for({name: torch.empty(80, 80) for name in "ab"}, TrainerSettings(moments_on="host"))
    assert len(asked) == 1, "on a CPU they are on the host anyhow"


async def step(trainer: NativeTrainer, seed: int) -> None:
    await trainer.forward_backward(batch(seed), LOSSES)
    await trainer.apply(1 / 50)


def weights(trainer: NativeTrainer) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in hf_views(trainer.decoder)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def made(steps: int = 9, **changes: Any) -> NativeTrainer:
    return NativeTrainer(decoder(**SIZES), TrainerSettings(**HOW | changes), steps=steps)


async def test_a_resumed_run_in_8_bits_is_bit_for_bit_the_same(tmp_path):
    undisturbed = made(moments="int8")
    for seed in range(4):
        if seed == 2:
            await undisturbed.snapshot()
            await undisturbed.save(str(tmp_path / "two"))
        await step(undisturbed, seed)
    resumed = made(moments="int8")
    await resumed.load(str(tmp_path / "two"))
    for seed in (2, 3):
        await step(resumed, seed)
    assert equal(weights(resumed), weights(undisturbed))


@pytest.mark.parametrize(("saved", "loaded"), [("float32", "int8"), ("int8", "float32")])
async def test_a_checkpoint_is_of_float32_numbers_whatever_made_it(tmp_path, saved: str, loaded: str):
    first, second = made(moments=saved), made(moments=loaded)
    for seed in range(3):
        await step(first, seed)
    await first.snapshot()
    await first.save(str(tmp_path / "saved"))
    await second.load(str(tmp_path / "saved"))
    await second.snapshot()
    await second.save(str(tmp_path / "again"))
    kept, again = (
        {block.name: block.tensor for block in t._room.optimizer if block.name.startswith(MOMENTS)} for t in (first, second)
    )
    assert kept.keys() == again.keys() and all(t.dtype == torch.float32 for t in (*kept.values(), *again.values()))
    assert all((again[name] - kept[name]).norm() <= 0.02 * kept[name].norm() for name in kept)
    if saved == "int8":
        assert equal(kept, again), "nothing is rounded on the way to float32"
    await step(second, 3)


@pytest.mark.parametrize("kind", ["float32", "int8"])
async def test_a_trainer_that_sleeps_holds_neither_moments_nor_gradients_and_goes_on_as_if_awake(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setattr(native_trainer, "LEAVES", ("cpu",))
    awake, asleep = made(moments=kind), made(moments=kind)
    await asleep.sleep()
    for seed in range(4):
        await awake.forward_backward(batch(seed), LOSSES)
        await asleep.forward_backward(batch(seed), LOSSES)
        await asleep.sleep()  # for a probe
        held = [p.grad for p in asleep.decoder.parameters() if p.grad is not None]
        held += [t for each in asleep._optimizer._moments.values() for t in each.held]
        assert held and all(t.untyped_storage().nbytes() == 0 for t in held)
        if seed not in (1, 2):  # whatever needs them brings them back
            await asleep.wake()
        if seed == 1:
            await awake.forward_backward(batch(9), LOSSES)
            await asleep.forward_backward(batch(9), LOSSES)
        await awake.apply(1 / 50)
        await asleep.apply(1 / 50)
        await asleep.sleep()
        assert all(t.untyped_storage().nbytes() == 0 for each in asleep._optimizer._moments.values() for t in each.held)
        assert equal(weights(asleep), weights(awake)), seed
        if seed == 2:
            await asleep.snapshot()
            await asleep.sleep()  # after the copy
            await asleep.save(str(tmp_path / "saved"))
            await asleep.sleep()
        await asleep.wake()
    resumed = made(moments=kind)
    await resumed.load(str(tmp_path / "saved"))
    await step(resumed, 3)
    assert equal(weights(resumed), weights(awake)), "it was saved as it stood"
    await asleep.close()


async def test_a_critics_moments_leave_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_trainer, "LEAVES", ("cpu",))
    settings = TrainerSettings(**HOW)
    model = decoder(**SIZES)
    trainer = NativeTrainer(model, settings, steps=4, critic=Critic(value_model(seed=2), settings, 4))
    await step(trainer, 0)
    await trainer.sleep()
    held = [t for each in trainer._critic._optimizer._moments.values() for t in each.held]
    assert held and all(t.untyped_storage().nbytes() == 0 for t in held)
    await step(trainer, 1)
    assert all(t.untyped_storage().nbytes() for t in held)
