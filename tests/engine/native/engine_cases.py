"""Tiny models and a plain reference for the engine's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tidemill.core.types import SamplingParams, Version
from tidemill.core.weight_update import UpdateSupport, WeightPart, WeightUpdate
from tidemill.engine.native import native_engine
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.architecture import Architecture
from tidemill.models.attention import packed_attention, packed_positions
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import serving_slices
from tidemill.models.served_weights import Contents

VOCAB = 61
BASE = Architecture(
    family="llama",
    vocab=VOCAB,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    context=96,
    windows=(None, None),
)
FAMILIES = {
    "llama": BASE,
    "mistral": replace(BASE, family="mistral", windows=(7, 7)),
    "qwen2": replace(BASE, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(BASE, family="qwen3", qk_norm=True, windows=(None, 10)),
}


def decoder(arch: Architecture = BASE, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(arch)
    model.initialise(torch.Generator().manual_seed(seed), std=0.3)  # far from uniform, so that errors show
    return model.to(dtype)


def engine(arch: Architecture = BASE, seed: int = 0, receiver: MemoryReceiver | None = None, **settings) -> NativeEngine:
    eos = settings.pop("eos_ids", ())
    chosen = EngineSettings(**{"device": "cpu", "max_sequences": 8, "page_size": 4, **settings})
    model = decoder(arch, seed, getattr(torch, chosen.dtype))
    return NativeEngine(model, chosen, receiver=receiver, version=Version(0), name="engine-0", eos_ids=eos)


def with_pages(monkeypatch, pages: int) -> None:
    """Engines built from now on have `pages` KV pages, the null page not counted."""
    monkeypatch.setattr(native_engine, "pages_of", lambda *_: pages + 1)


@torch.no_grad()
def reference(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """[T, V] float64 logits of a plain full forward: row t predicts tokens[t + 1]."""
    attend = packed_attention([len(tokens)], model.arch.windows)
    hidden = model(torch.from_numpy(np.asarray(tokens, np.int64)), packed_positions([len(tokens)]), attend)
    return model.logits(hidden).double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference_logprobs(model: Decoder, prompt: np.ndarray, sampled: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[n] logprobs of the sampled tokens after the prompt."""
    whole = np.concatenate([prompt, sampled])
    rows = log_softmax(reference(model, whole[:-1])[len(prompt) - 1 :] / temperature)
    return rows[np.arange(len(sampled)), sampled]


def kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] logprobs of the distribution that `params` ask for, -inf where truncated: ten lines of NumPy."""
    probabilities = np.exp(log_softmax(logits / params.temperature))
    order = np.argsort(-probabilities, kind="stable")
    keep = np.zeros(len(logits), bool)
    total = probabilities[order[: params.top_k]].sum() if params.top_k else 1.0
    mass = 0.0
    for rank, token in enumerate(order):
        if (params.top_k and rank >= params.top_k) or mass >= params.top_p * total:
            break
        keep[token] = probabilities[token] >= params.min_p * probabilities[order[0]]
        mass += probabilities[token]
    with np.errstate(divide="ignore"):
        return np.log(np.where(keep, probabilities, 0) / probabilities[keep].sum())


def prompts(count: int, low: int = 3, high: int = 30, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


class MemoryReceiver:
    """Hands over the weights of decoders that lie in memory."""

    takes = UpdateSupport()

    def __init__(self) -> None:
        self.models: dict[int, Decoder] = {}
        self.corrupt = False
        self.closed = False

    def publish(self, step: int, model: Decoder, dtype: torch.dtype = torch.float32) -> WeightUpdate:
        model = model.to(dtype)
        self.models[step] = model
        return WeightUpdate(
            Version(step, fingerprint=Contents.of(model, dtype).fingerprint), (WeightPart("memory", str(step)),)
        )

    def receive(self, published: WeightUpdate):
        for piece in serving_slices(
            self.models[published.version.step], self.models[published.version.step].embed.weight.dtype
        ):
            if self.corrupt and piece.name.endswith("down_proj.weight"):
                piece = replace(piece, tensor=piece.tensor.clone())
                piece.tensor[0, 0] += 1e-3
            yield piece

    def close(self) -> None:
        self.closed = True
