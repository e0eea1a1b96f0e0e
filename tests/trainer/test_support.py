"""Truncated sampling: the trainer's logprobs are of the distribution that was sampled, and so are its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_cases import VOCAB, decoder, sample

from tidemill.core.types import GenerateRequest, LossSpec, Sample, SamplingParams, Support, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings


async def sampled(params: dict[str, float], count: int = 6) -> list[Sample]:
    settings = EngineSettings(device="cpu", max_sequences=8, context=64, kv_memory_mb=4)
    engine = NativeEngine(decoder(), settings, receiver=None, version=Version(0), name="engine", eos_ids=())
    prompt, rows = np.arange(5, dtype=np.int32), []
    for i in range(count):
        asked = SamplingParams(max_tokens=4 + i, ignore_eos=True, seed=i, **params)
        done = await engine.generate(GenerateRequest(prompt, asked, key=str(i)))
        tokens = np.concatenate([prompt, done.tokens])
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[mask] = done.logprobs
        none = np.where(mask, 0, -1).astype(np.int32)
        rows.append(Sample(tokens, mask, logprobs, none, mask * np.float32(i - 2), mask * np.float32(1.0)))
        rows[-1].temperature, rows[-1].support = asked.temperature, done.support
    await engine.close()
    return rows


@pytest.mark.parametrize(
    "params", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.7, "top_k": 5, "temperature": 0.8}, {}]
)
async def test_engine_and_trainer_agree_on_what_was_sampled(params):
    rows = await sampled(params)
    assert all((row.support is not None) == bool(params) for row in rows)
    trainer = NativeTrainer(decoder(), TrainerSettings(micro_batch_tokens=24), steps=1)
    spec = {"policy": LossSpec("importance")}
    for seen in (await trainer.forward(rows), (await trainer.forward_backward(rows, spec)).logprobs):
        for row, values in zip(rows, seen, strict=True):
            np.testing.assert_allclose(values[row.mask], row.logprobs[row.mask], atol=2e-6)


async def test_without_the_support_they_do_not():
    rows = await sampled({"top_p": 0.5})
    trainer = NativeTrainer(decoder(), TrainerSettings(), steps=1)
    for row in rows:
        row.support = None
    gaps = [np.abs(v[r.mask] - r.logprobs[r.mask]).mean() for r, v in zip(rows, await trainer.forward(rows), strict=True)]
    assert min(gaps) > 1e-2


async def test_the_gradient_is_that_of_the_distribution_over_the_support():
    rng = np.random.default_rng(0)
    row = sample(rng, np.arange(4), 3, logprobs=np.zeros(7, np.float32))
    kept = [np.array([row.tokens[4], 1, 2]), np.array([row.tokens[5], 9]), np.arange(VOCAB)]
    kept = [np.unique(ids).astype(np.int32) for ids in kept]
    row.support = Support(np.concatenate(kept), np.cumsum([0, *map(len, kept)]).astype(np.int32))
    trainer = NativeTrainer(decoder(torch.float64), TrainerSettings(), steps=1)
    plain = decoder(torch.float64)
    tokens = torch.from_numpy(row.tokens[:-1].astype(np.int64))
    hidden = plain(tokens, packed_positions([6]), packed_attention([6], plain.arch.windows, tokens.device))
    logits = plain.logits(hidden[3:])
    total = torch.zeros((), dtype=torch.float64)
    for i, ids in enumerate(kept):
        among = torch.log_softmax(logits[i, torch.from_numpy(ids.astype(np.int64))], -1)
        a, w = float(row.advantages[4 + i]), float(row.weights[4 + i])
        total = total - w * a * among[int(np.flatnonzero(ids == row.tokens[4 + i])[0])]
    total.backward()
    await trainer.forward_backward([row], {"policy": LossSpec("reinforce")})
    for own, expected in zip(trainer.decoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-9, atol=1e-12)
