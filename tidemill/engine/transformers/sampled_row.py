"""A request under way in the engine over `transformers`: its tokens, its cache, and what is recorded of each token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.core.types import Completion, Finish, GenerateRequest, Support, Version
from tidemill.engine.native.sampler import Adjustment, RowParams, alternatives, mixed, sample, uniforms


@dataclass(slots=True, eq=False)
class SampledRow:
    """One request. Its noise is that of the native engine: it follows from the seed and the position alone."""

    request: GenerateRequest
    tokens: list[int]  # of the prompt, and those that were sampled
    ends: tuple[int, ...]  # ids that end it
    context: int
    cache: Any = None  # of some first tokens
    begun: bool = False
    aborted: bool = False
    arrived: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    first_token_s: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)  # that sampled each token
    supports: list[np.ndarray] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    extras: list[dict[str, float]] = field(default_factory=list)  # of a subclass of the engine

    @property
    def finish(self) -> Finish | None:
        """The reason why it has ended; None while it goes on."""
        params, sampled = self.request.params, len(self.logprobs)
        if self.aborted:
            return Finish.CANCELLED
        if sampled and self.tokens[-1] in self.ends:
            return Finish.STOP
        if sampled >= params.max_tokens:
            return Finish.LENGTH
        return Finish.CONTEXT if len(self.tokens) >= self.context else None

    def add(self, logits: Tensor, version: Version) -> None:
        """Sample the next token from `logits` [1, V] float32, which the weights of `version` computed."""
        params, position, first = self.request.params, len(self.tokens), len(self.request.tokens)
        one, seed = lambda value: np.array([value]), mixed(np.array([params.seed % 2**64], np.uint64))
        uniform = uniforms(seed, one(position))
        asked = RowParams(one(params.temperature), one(params.top_p), one(params.top_k), one(params.min_p), uniform)
        if params.adjusted:
            row = np.array(self.tokens)
            asked.adjustments[0] = Adjustment(params, self.ends, row[:first], row[first:])
        found = sample(logits, asked)
        if params.top_logprobs:
            ids, logprobs = alternatives(torch.log_softmax(logits, -1), params.top_logprobs)
            self.tops.append((ids[0], logprobs[0]))
        if 0 in found.supports:
            self.supports.append(found.supports[0])
        self.tokens.append(int(found.tokens[0]))
        self.logprobs.append(float(found.logprobs[0]))
        self.model_logprobs.append(float(found.model_logprobs[0]))
        self.versions.append(version)
        self.first_token_s = self.first_token_s or time.monotonic() - self.arrived

    def completion(self, finish: Finish, engine: str) -> Completion:
        params, first = self.request.params, len(self.request.tokens)
        truncated = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
        offsets = np.cumsum([0, *map(len, self.supports)]).astype(np.int32)
        ids = np.concatenate([np.zeros(0, np.int32), *self.supports])
        named = {name: [each[name] for each in self.extras] for name in self.request.extras if name != "model_logprobs"}
        if "model_logprobs" in self.request.extras:
            named["model_logprobs"] = self.model_logprobs
        return Completion(
            tokens=np.array(self.tokens[first:], np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array([version.step for version in self.versions], np.int32),
            sources=tuple(dict.fromkeys(self.versions)),
            finish=finish,
            prompt_tokens=first,
            support=Support(ids, offsets) if truncated else None,
            top_ids=np.stack([ids for ids, _ in self.tops]) if self.tops else None,
            top_logprobs=np.stack([logprobs for _, logprobs in self.tops]) if self.tops else None,
            queued_s=self.queued_s,
            first_token_s=self.first_token_s,
            engine=engine,
            extras={name: np.array(entries, np.float32) for name, entries in named.items()},
        )
