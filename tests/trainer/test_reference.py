"""A second policy beside the trained one: its logprobs, how it follows, what a checkpoint holds of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_cases import LOSSES, batch, decoder

from tidemill.core.errors import CheckpointError
from tidemill.models.decoder import Decoder
from tidemill.trainer.companions import Reference
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

SETTINGS = TrainerSettings(lr=1e-2)


def trainer(reference: Reference | None, seed: int = 0) -> NativeTrainer:
    return NativeTrainer(decoder(seed=seed), SETTINGS, steps=8, reference=reference)


async def step(of: NativeTrainer) -> None:
    await of.forward_backward(batch(), LOSSES)
    await of.apply(0.1)


def weights(of: Decoder) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in of.parameters()])


async def test_its_logprobs_are_those_of_its_weights_and_stay_what_they_were():
    own, other = trainer(Reference(decoder(seed=1))), trainer(None, seed=1)
    rows = batch()
    expected = await other.forward(rows)
    for _ in range(2):
        for a, b in zip(await own.forward(rows, "reference"), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        await step(own)
    with pytest.raises(ValueError, match="without a reference"):
        await other.forward(rows, "reference")


async def test_it_follows_the_policy_as_far_as_it_is_told():
    policy = trainer(Reference(decoder(seed=1), every=2, decay=0.75))
    reference = policy._reference
    assert reference is not None
    before = weights(reference.decoder)
    await step(policy)
    assert torch.equal(weights(reference.decoder), before)
    await step(policy)
    expected = 0.75 * before + 0.25 * weights(policy.decoder)
    torch.testing.assert_close(weights(reference.decoder), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("every", [0, 1])
async def test_a_run_that_goes_on_has_the_reference_it_had(tmp_path: Path, every: int):
    first = trainer(Reference(decoder(seed=1), every=every, decay=0.5))
    await step(first)
    await first.snapshot()
    await step(first)
    await first.save(str(tmp_path / "saved"))
    second = trainer(Reference(decoder(seed=1), every=every, decay=0.5), seed=7)
    await second.load(str(tmp_path / "saved"))
    await step(second)
    assert first._reference is not None and second._reference is not None
    assert torch.equal(weights(first.decoder), weights(second.decoder))
    assert torch.equal(weights(first._reference.decoder), weights(second._reference.decoder))
    if every:
        with pytest.raises(CheckpointError, match="tensors do not belong here"):
            await trainer(None).load(str(tmp_path / "saved"))


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 29 tokens, the policy one of 23"):
        trainer(Reference(decoder(vocab_size=29)))
    with pytest.raises(ValueError, match=r"set reference\.every = 0"):
        trainer(Reference(decoder(num_hidden_layers=1), every=1))
    trainer(Reference(decoder(num_hidden_layers=1)))  # another size is fine, as long as it stays what it is
