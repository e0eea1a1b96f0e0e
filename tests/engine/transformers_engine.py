"""A test engine over `transformers`: plain forward passes, no KV cache, one row at a time.

It shares no code with the native engine, can do less, and says so. It is registered as an engine kind by the tests.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, Scored, Telemetry, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.engine_kinds import BaseEngineSettings, EngineSpec
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Receiver, Slice
from tidemill.runtime.cpu_sharing import Cores

ENTROPY = TokenExtra("entropy", "float32", fill=-1)  # of the distribution that a token was sampled from, in nats


class TransformersSettings(BaseEngineSettings):
    kind: Literal["transformers"] = "transformers"


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> TransformersEngine:
    return TransformersEngine(spec.model, receiver, spec.version, spec.engine.context)


class TransformersEngine:
    """Every token costs a forward pass over the whole row; between two tokens the event loop has its turn."""

    def __init__(self, folder: Path, receiver: Receiver | None, version: Version, context: int | None = None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._receiver, self._version = receiver, version
        self._takes = UpdateSupport(several_parts=True).both(receiver.takes if receiver else UpdateSupport(()))
        self._context = min(context or 1 << 30, self._model.config.max_position_embeddings)
        ends = self._model.generation_config.eos_token_id
        self._eos = {ends} if isinstance(ends, int) else set(ends or ())
        self._open, self._aborted, self._counts = Counter[str](), Counter[str](), Counter[str]()
        self._closed = False

    async def capabilities(self) -> Capabilities:
        able = Capabilities(self._context, token_versions=False, support=False, extras=(ENTROPY,), proof="received")
        return replace(able, updates=self._takes)

    async def generate(self, request: GenerateRequest) -> Completion:
        self._expect_open()
        self._check(request)
        oldest, aborts = self._version, self._aborted[request.key]
        tokens, logprobs, finish = [int(token) for token in request.tokens], list[float](), Finish.LENGTH
        entropies = list[float]()
        self._open[request.key] += 1
        self._counts["prompt"] += len(request.tokens)
        try:
            while (finish := self._finish(request, tokens)) is None:
                await asyncio.sleep(0)  # bounded: the loop's turn
                self._expect_open()
                if self._aborted[request.key] > aborts:
                    finish = Finish.CANCELLED
                    break
                token, logprob, entropy = self._sample(request, tokens)
                tokens.append(token)
                logprobs.append(logprob)
                entropies.append(entropy)
                self._counts["generated"] += 1
        finally:
            self._open[request.key] -= 1
        sampled = np.array(tokens[len(request.tokens) :], np.int32)
        return Completion(
            tokens=sampled,
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(sampled), oldest.step, np.int32),
            sources=(oldest,),
            finish=finish,
            prompt_tokens=len(request.tokens),
            extras={"entropy": np.array(entropies, np.float32)} if request.extras else {},
        )

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        self._expect_open()
        if temperature <= 0 or policy != "policy":
            raise ValueError(f"score with temperature = {temperature:g} of {policy!r}: expected above 0, and 'policy'")
        rows = torch.log_softmax(self._logits(tokens)[:-1] / temperature, -1)
        found = rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:].astype(np.int64))]
        return Scored(np.concatenate([[0.0], found.numpy()]).astype(np.float32), self._version)

    async def update(self, update: WeightUpdate) -> Version:
        self._expect_open()
        self._takes.check(update, "this engine", self._version)
        assert self._receiver is not None
        pieces = [replace(each, tensor=each.tensor.clone()) for each in self._receiver.receive(update)]
        if (digest := fingerprint(pieces)) != update.version.fingerprint:
            raise PolicyMismatch(f"received {digest}, published was {update.version.fingerprint}")
        missing, unexpected = self._model.load_state_dict(_whole(pieces), strict=False)
        assert not unexpected and {*missing} <= {"lm_head.weight"}, (missing, unexpected)
        self._model.tie_weights()
        self._version = update.version
        return self._version

    async def abort(self, key: str) -> None:
        self._aborted[key] += 1

    async def sleep(self, weights: bool = False) -> None:
        raise ValueError("sleep: this engine holds its memory until it is closed")

    async def wake(self) -> None:
        raise ValueError("wake: this engine never sleeps")

    async def stats(self) -> EngineStats:
        counts, running = self._counts, self._open.total()
        return EngineStats(0, running, self._version, 0.0, counts["generated"], 0, counts["prompt"], 0)

    async def telemetry(self) -> Telemetry:
        return Telemetry("engine", os.getpid(), [], {})

    async def close(self) -> None:
        self._closed = True

    def _expect_open(self) -> None:
        if self._closed:
            raise EngineFailed("the engine is closed")

    def _check(self, request: GenerateRequest) -> None:
        p, tokens, vocab = request.params, request.tokens, self._model.config.vocab_size
        if request.policy != "policy":
            raise ValueError(f"policy {request.policy!r}: this engine serves 'policy' only")
        if not 0 < len(tokens) < self._context or tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"a prompt of {len(tokens)}: expected 1 to {self._context - 1} tokens below {vocab}")
        cannot = {"constraint": request.constraint is not None, "top_p": p.top_p < 1, "top_k": p.top_k, "min_p": p.min_p}
        cannot |= {name: name != "entropy" for name in request.extras}
        cannot |= {"top_logprobs": p.top_logprobs, "min_tokens": p.min_tokens, "penalties and logit_bias": p.adjusted}
        if asked := [name for name, given in cannot.items() if given]:
            raise ValueError(f"{asked[0]} is not supported by this engine: leave it out")

    def _finish(self, request: GenerateRequest, tokens: list[int]) -> Finish | None:
        p, sampled = request.params, len(tokens) - len(request.tokens)
        ends = {*p.stop_ids} | (set[int]() if p.ignore_eos else self._eos)
        if sampled and tokens[-1] in ends:
            return Finish.STOP
        if len(tokens) >= self._context:
            return Finish.CONTEXT
        return Finish.LENGTH if sampled >= p.max_tokens else None

    def _sample(self, request: GenerateRequest, tokens: list[int]) -> tuple[int, float, float]:
        """A token, its logprob, and the entropy of the distribution that it comes from."""
        logits, temperature = self._logits(np.array(tokens))[-1], request.params.temperature
        if temperature == 0:
            return int(logits.argmax()), 0.0, 0.0
        logprobs = torch.log_softmax(logits / temperature, -1).numpy()
        noise = np.random.default_rng((request.params.seed, len(tokens))).gumbel(size=len(logprobs))
        token = int((logprobs + noise).argmax())
        return token, float(logprobs[token]), float(-(np.exp(logprobs) * logprobs).sum())

    def _logits(self, tokens: Array) -> torch.Tensor:
        """[T, V] float64."""
        with torch.no_grad():
            return self._model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double()


def _whole(pieces: Iterable[Slice]) -> dict[str, torch.Tensor]:
    """Whole tensors, put together from their slices."""
    found = dict[str, torch.Tensor]()
    for piece in pieces:
        tensor = found.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.tensor.dtype))
        tensor[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))] = piece.tensor
    return found
