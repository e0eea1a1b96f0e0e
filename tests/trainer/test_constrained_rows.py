"""Rows that were sampled under a grammar: however their support is written, it is the same to the trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from trainer_cases import VOCAB, decoder, sample

from tidemill.core.sampling_support import Support, SupportRecord
from tidemill.core.types import LossSpec, Sample
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings


def masks(rng: np.random.Generator, row: Sample) -> list[np.ndarray]:
    """[V] bool for each sampled token, which it keeps: few ids, nearly all, or all; some positions have the same."""
    states = [rng.random(VOCAB) < share for share in (0.1, 0.5, 0.9, 0.98, 1.0)]
    found = []
    for token in row.tokens[row.mask].tolist():
        kept = states[rng.integers(len(states))].copy()
        kept[token] = True
        found.append(kept)
    return found


def rows_of(seed: int) -> tuple[list[Sample], list[Sample]]:
    """Rows with their supports as short as they can be, and as a list for each token; one of them has none."""
    rng, short, long = np.random.default_rng(seed), list[Sample](), list[Sample]()
    for length in (4, 9, 1, 6):
        row, record = sample(rng, rng.integers(0, VOCAB, 5), length), SupportRecord()
        every = masks(rng, row)
        for kept in every:
            record.add_mask(kept)
        ids = [np.flatnonzero(kept).astype(np.int32) for kept in every]
        plain = Support(np.concatenate(ids), np.cumsum([0, *map(len, ids)]).astype(np.int32))
        short.append(replace(row, support=record.support()))
        long.append(replace(row, support=plain))
    whole = sample(rng, rng.integers(0, VOCAB, 3), 4)
    return [*short, whole], [*long, whole]


async def test_logprobs_and_gradients_are_those_of_the_listed_ids() -> None:
    short, long = rows_of(0)
    assert any(row.support is not None and row.support.lacks is not None for row in short)
    assert any(row.support is not None and row.support.sets is not None for row in short)
    trainers = [NativeTrainer(decoder(torch.float64), TrainerSettings(micro_batch_tokens=16), steps=1) for _ in range(2)]
    seen, gradients = [], []
    for trainer, rows in zip(trainers, (short, long), strict=True):
        seen.append(await trainer.forward(rows))
        await trainer.forward_backward(rows, {"policy": LossSpec("reinforce")})
        gradients.append([p.grad for p in trainer.decoder.parameters()])
    for a, b in zip(*seen, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    bare = await trainers[0].forward([replace(row, support=None) for row in short])
    assert max(float(np.abs(a - b).max()) for a, b in zip(seen[0], bare, strict=True)) > 0.05
