"""Logprobs and logits of given tokens, from a native trainer, engine or decoder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import torch

from tidemill.core.types import Array, Sample, Support, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings


def sample_of(tokens: Array, mask: Array, temperature: float = 1.0, support: Support | None = None) -> Sample:
    """A sample that asks for the logprob of every token but the first, whether `mask` marks it as sampled or not."""
    zero, unknown = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
    weights = (np.arange(len(tokens)) > 0).astype(np.float32)
    return Sample(tokens, mask & (weights > 0), zero, unknown, zero, weights, temperature=temperature, support=support)


async def trained(decoder: Decoder, settings: TrainerSettings, samples: list[Sample]) -> list[Array]:
    """The trainer's logprobs of each sample's tokens, [T]."""
    trainer = NativeTrainer(decoder, settings, steps=1)
    try:
        return await trainer.forward(samples)
    finally:
        await trainer.close()


@asynccontextmanager
async def engine_of(decoder: Decoder, settings: EngineSettings) -> AsyncIterator[NativeEngine]:
    """An engine that is never updated."""
    engine = NativeEngine(decoder, settings, receiver=None, version=Version(0), name="engine", eos_ids=())
    try:
        yield engine
    finally:
        await engine.close()


@torch.inference_mode()
def logits_of(decoder: Decoder, tokens: Array, places: Array | slice = slice(None)) -> Array:
    """The decoder's logits after the tokens at `places`, [n, V] float32."""
    device = decoder.embed.weight.device
    attend = packed_attention([len(tokens)], decoder.arch.windows, device)
    positions = packed_positions([len(tokens)]).to(device)
    hidden = decoder(torch.from_numpy(tokens.astype(np.int64)).to(device), positions, attend)
    return decoder.logits(hidden[places]).float().cpu().numpy()
