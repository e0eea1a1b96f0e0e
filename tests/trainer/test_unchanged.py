"""Weights that an update leaves as they were: why, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.types import LossSpec, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

BASE = TrainerSettings(lr=0.01, device="cpu")


class Discarding:
    def send(self, version: Version, slices: Any, onto: Any = None) -> WeightUpdate:
        list(slices)
        return WeightUpdate(version, (WeightPart("discarding", "nowhere"),))

    def close(self) -> None: ...


def trainer(steps: int = 4, **settings: Any) -> NativeTrainer:
    return NativeTrainer(decoder(), BASE.model_copy(update=settings), steps=steps, sender=Discarding())


async def step(under_test: NativeTrainer, losses: dict[str, LossSpec] = LOSSES, scale: float = 0.1) -> str:
    """What is said of the version that a step makes."""
    await under_test.forward_backward(batch(under_test.updates), losses)
    await under_test.apply(scale)
    return (await under_test.publish(Version(under_test.updates))).note


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_change_need_no_word(dtype: str) -> None:
    under_test = trainer(serving_dtype=dtype)
    assert (await under_test.publish(Version(0))).note == ""
    assert [await step(under_test) for _ in range(2)] == ["", ""]


async def test_the_same_weights_without_an_update_need_no_word() -> None:
    under_test = trainer()
    assert [(await under_test.publish(Version(i))).note for i in (0, 0, 1)] == ["", "", ""]


async def test_the_end_of_a_schedule_at_zero() -> None:
    under_test = trainer(steps=2, schedule="linear")
    await under_test.publish(Version(0))
    assert [await step(under_test) for _ in range(2)] == ["", "the learning rate is 0"]


async def test_no_gradient() -> None:
    under_test = trainer()
    await under_test.publish(Version(0))
    assert await step(under_test, scale=0.0) == "the gradient is zero"


async def test_an_update_that_bfloat16_does_not_show() -> None:
    under_test = trainer(lr=1e-9, serving_dtype="bfloat16")
    with torch.no_grad():
        for parameter in under_test.decoder.parameters():
            parameter.copy_(torch.full_like(parameter, 2.0**-9))  # float32 shows 1e-9 there
    await under_test.publish(Version(0))
    assert "below the resolution of bfloat16" in (said := await step(under_test)) and "own did change" in said


async def test_an_update_that_float32_does_not_show() -> None:
    under_test = trainer(lr=1e-20)
    with torch.no_grad():
        for parameter in under_test.decoder.parameters():
            parameter.add_(1e-3)  # a weight of 0 would show it
    await under_test.publish(Version(0))
    assert await step(under_test) == "the update is below the resolution of float32"


async def test_what_was_loaded_is_compared_with_nothing(tmp_path) -> None:
    under_test = trainer()
    await under_test.snapshot()
    await under_test.save(str(tmp_path / "c"))
    await under_test.publish(Version(0))
    await step(under_test)
    await under_test.load(str(tmp_path / "c"))
    assert (await under_test.publish(Version(0))).note == ""
