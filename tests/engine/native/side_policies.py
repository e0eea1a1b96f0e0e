"""Policies side by side for the engine's tests: adapters, updates that carry them, engines, and what each must compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from adapter_contract import PLAIN, SCALED, pieces_of
from engine_cases import BASE, decoder, log_softmax, reference, reference_logprobs

from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import UpdateSupport, WeightPart, WeightUpdate
from tidemill.engine.native.adapter_staging import SidePolicies
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.adapter_config import AdapterConfig
from tidemill.models.adapter_update import ReceivedAdapter, base_version
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.fingerprint import fingerprint
from tidemill.models.lora import adapters, attach
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice

CONFIGS = {
    "a": PLAIN,
    "b": SCALED,
    "c": AdapterConfig(rank=3, alpha=9, targets=("o_proj", "gate_proj"), layers=(1,)),
    "judge": AdapterConfig(rank=2, alpha=8, targets=("k_proj", "up_proj")),
}
TRAINED = ("a", "b", "c")


def trained(policy: str, seed: int, arch: Architecture = BASE, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model as the policy's trainer has it: the base, and an adapter in which nothing is 0."""
    model, generator = decoder(arch), torch.Generator().manual_seed(100 * seed + ord(policy[0]))
    attach(model, CONFIGS[policy], generator)
    with torch.no_grad():
        for _, adapter in adapters(model):
            for b in adapter.b:
                b.normal_(0.0, 0.2, generator=generator)
    return model.to(dtype)


class AdapterReceiver:
    """Hands over adapters that lie in memory."""

    takes = UpdateSupport(("adapter",), several_parts=True)

    def __init__(self, arch: Architecture = BASE, dtype: torch.dtype = torch.float32) -> None:
        self.base = base_version(Contents.of(decoder(arch), dtype).fingerprint)
        self._sent = dict[str, list[Slice]]()

    def publish(self, version: Version, model: Decoder, config: AdapterConfig | None = None) -> WeightUpdate:
        """The update to a policy's version, by the adapter of a model."""
        return self.send(version, pieces_of(model, config or CONFIGS[version.policy]))

    def send(self, version: Version, pieces: list[Slice], announced: str = "") -> WeightUpdate:
        """The update that brings these pieces. announced: the fingerprint that it claims; empty: their own."""
        place = str(len(self._sent))
        self._sent[place] = [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]
        version = replace(version, fingerprint=announced or fingerprint(self._sent[place]))
        return WeightUpdate(version, (WeightPart("memory", place),), "adapter", self.base)

    def receive(self, update: WeightUpdate) -> Iterator[Slice]:
        return iter(self._sent[update.parts[0].location])

    def close(self) -> None:
        pass


def frozen(policy: str, seed: int, arch: Architecture = BASE) -> dict[Version, ReceivedAdapter]:
    """A policy that is served as it is, as an engine is given it."""
    tensors = {piece.name: piece.tensor.clone() for piece in pieces_of(trained(policy, seed, arch), CONFIGS[policy])[1:]}
    adapter = ReceivedAdapter(CONFIGS[policy], tensors)
    return {Version(0, policy=policy, fingerprint=adapter.fingerprint): adapter}


def side_by_side(receiver: Any, names: Sequence[str] = TRAINED, arch: Architecture = BASE, **settings: Any) -> NativeEngine:
    """An engine of the trained policies `names` and of the frozen one "judge", whose adapter has seed 0."""
    chosen = EngineSettings(**{"device": "cpu", "max_sequences": 8, "page_size": 4, **settings})
    policies = SidePolicies(tuple(Version(-1, policy=name) for name in names), frozen("judge", 0, arch))
    model = decoder(arch, dtype=getattr(torch, chosen.dtype))
    return NativeEngine(model, chosen, receiver=receiver, version=policies, name="engine-0", eos_ids=())


def asked(policy: str, text: np.ndarray, key: str = "", **params: Any) -> GenerateRequest:
    return GenerateRequest(text, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params}), policy, key)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def expect_sampled_by(model: Decoder, text: np.ndarray, done: Completion, atol: float = 2e-5) -> None:
    """The logprobs of a reply, and of the alternatives to each of its tokens, are those of this model."""
    np.testing.assert_allclose(done.logprobs, reference_logprobs(model, text, done.tokens), atol=atol)
    if done.top_ids is not None:
        rows = log_softmax(reference(model, np.concatenate([text, done.tokens[:-1]]))[len(text) - 1 :])
        np.testing.assert_allclose(done.top_logprobs, np.take_along_axis(rows, done.top_ids.astype(int), 1), atol=atol)
