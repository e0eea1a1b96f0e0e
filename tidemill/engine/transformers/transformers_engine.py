"""Engine over `transformers`: one row at a time, exact logprobs, updates between two tokens.

It computes what `transformers` computes, and takes its time. The noise is the native engine's, so with equal logits the two
sample equal tokens. One thread computes; rows take turns, a token each, and new weights take a turn of their own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tidemill.core import fault_injection
from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.executors import in_thread
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.token_extras import MODEL_LOGPROBS, TokenExtra
from tidemill.core.types import Array, Completion, GenerateRequest, InFlight, Scored, Telemetry, Version
from tidemill.core.weight_update import UpdateKind, UpdateSupport, WeightUpdate
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.activity import Activity
from tidemill.engine.native.cache_size import device_of
from tidemill.engine.native.sampler import alternatives
from tidemill.engine.request_refusals import (
    check_forward,
    check_length,
    check_policy,
    check_request,
    check_temperature,
    checked_tokens,
)
from tidemill.engine.transformers.causal_model import CausalModel
from tidemill.engine.transformers.sampled_row import SampledRow
from tidemill.engine.transformers.transformers_settings import TransformersSettings
from tidemill.engine.verified_weights import ReceivedWeights, received_weights
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import Receiver
from tidemill.observability.process_memory import PeakMemory
from tidemill.runtime.cpu_sharing import Cores

T = TypeVar("T")
TURN_S = 3600.0  # for a place, or for the rows in flight to end; the caller has a deadline of its own
CONTEXT = 2048  # of a model that knows no limit, unless the settings name one


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> TransformersEngine:
    """Load the folder's model and start the engine."""
    assert isinstance(spec.engine, TransformersSettings)
    device, dtype = torch.device(device_of(spec.engine.device)), getattr(torch, spec.engine.dtype)
    model = CausalModel(spec.model, dtype, device)
    base = AdaptedBase.of_folder(spec.model, spec.base_dtype, dtype) if spec.adapter_rank else None
    return TransformersEngine(
        model, spec.engine, receiver=receiver, version=spec.version, name=spec.name, cores=cores, base=base
    )


class TransformersEngine:
    """`interfaces.Engine` over a model of `transformers`."""

    extras: tuple[TokenExtra, ...] = (MODEL_LOGPROBS,)

    def __init__(
        self,
        model: CausalModel,
        settings: TransformersSettings,
        *,
        receiver: Receiver | None,
        version: Version,
        name: str,
        cores: Cores | None = None,
        base: AdaptedBase | None = None,
    ) -> None:
        """Serve `model` as `version`. receiver: source of updates; None for an engine that is never updated.

        base: the weights that each version, an adapter, is added to; None: versions are whole weights.
        """
        self.name, self.settings = name, settings
        self._model, self._receiver, self._version = model, receiver, version
        kinds: tuple[UpdateKind, ...] = ("full", "delta") if base is None else ("adapter",)
        self._base = base
        self._takes = UpdateSupport(kinds, True).both(receiver.takes if receiver else UpdateSupport(()))
        self._context = settings.context_of(model.positions or settings.context or CONTEXT)
        self._cores, self._activity, self._memory = cores or Cores(), Activity(), PeakMemory()
        self._rows = set[SampledRow]()
        self._updating = self._draining = False
        self._changed = asyncio.Event()  # set, and replaced by a new one, when something has ended
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._failure: Exception | None = None

    async def capabilities(self) -> Capabilities:
        return Capabilities(self._context, extras=self.extras, updates=self._takes)

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check_alive()
        check_request(request, self.name, self.extras)
        check_policy(request.policy, (self._version.policy,), self.name)
        tokens = checked_tokens(request.tokens, self._model.vocab).tolist()
        check_length(len(tokens), self._context, reply=1)
        params = request.params
        ends = params.stop_ids if params.ignore_eos else (*params.stop_ids, *self._model.ends)
        row = SampledRow(request, tokens, ends, self._context)
        self._rows.add(row)
        try:
            await self._until(lambda: not self._draining and self._running < self.settings.max_sequences)
            self._activity.counters["prompt_tokens"] += len(tokens)
            row.begun, row.queued_s = True, time.monotonic() - row.arrived
            while (finish := row.finish) is None:
                await self._turn(self._step, row)
                self._activity.counters["generated_tokens"] += 1
        finally:
            self._rows.discard(row)
            self._tell()
            if not self._rows:
                self._cores.leave()
        return row.completion(finish, self.name)

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        self._check_alive()
        check_temperature(temperature)
        check_policy(policy, (self._version.policy,), self.name)
        tokens = checked_tokens(tokens, self._model.vocab)
        check_length(len(tokens), self._context)
        return await self._turn(self._score, tokens, temperature, min(top_k, self._model.vocab))

    async def update(self, update: WeightUpdate) -> Version:
        await self._until(lambda: not self._updating)
        self._updating = True
        try:
            self._check_alive()
            if self._receiver is None:
                raise RuntimeError(f"engine {self.name} was built without a receiver: it cannot be updated")
            self._takes.check(update, f"engine {self.name}", self._version)
            check_forward(update.version, self._version, self.name)
            fault_injection.reach(self.name, "stage", update.version.step)
            with self._activity.beside("stage", step=update.version.step, bytes=update.bytes):
                staged = await in_thread(self._stage, self._receiver, update)
            self._draining = self.settings.in_flight == InFlight.FINISH
            await self._until(lambda: not (self._draining and self._running))
            with self._activity.beside("commit", step=update.version.step):
                await self._turn(self._commit, staged, update.version)
            return self._version
        finally:
            self._updating = self._draining = False
            self._tell()

    async def abort(self, key: str) -> None:
        for row in self._rows:
            row.aborted |= row.request.key == key

    async def sleep(self, weights: bool = False) -> None:
        raise ValueError(f"sleep: engine {self.name} holds its memory until it is closed; set placement.share = 'beside'")

    async def wake(self) -> None:
        raise ValueError(f"wake: engine {self.name} never sleeps")

    async def stats(self) -> EngineStats:
        counters, running = self._activity.counters, self._running
        generated, prompts = int(counters["generated_tokens"]), int(counters["prompt_tokens"])
        return EngineStats(len(self._rows) - running, running, self._version, 0.0, generated, 0, prompts, 0)

    def progress(self) -> float:
        """Tokens computed and rows scored."""
        return self._activity.counters["steps"]

    async def telemetry(self) -> Telemetry:
        return Telemetry(self.name, os.getpid(), self._activity.take(), dict(self._activity.counters), self._memory.update())

    async def close(self) -> None:
        self._failure = self._failure or EngineFailed(f"engine {self.name} was closed")
        self._tell()
        await self._until(lambda: not self._updating)  # it may still be receiving
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._computing.shutdown(wait=False)

    def _sampled(self, row: SampledRow, logits: Tensor) -> None:
        """Sample the next token of a row. A subclass records here what it returns besides."""
        row.add(logits, self._version)

    def _step(self, row: SampledRow) -> None:
        fault_injection.reach(self.name, "generate", self._version.step)
        logits, row.cache = self._model.following(row.tokens, row.cache)
        self._sampled(row, logits)

    def _score(self, tokens: np.ndarray, temperature: float, top_k: int) -> Scored:
        logprobs = np.zeros(len(tokens), np.float32)
        ids, tops = np.full((len(tokens), top_k), -1, np.int32), np.zeros((len(tokens), top_k), np.float32)
        done = 0
        for logits in self._model.rows(tokens[:-1]) if len(tokens) > 1 else ():
            rows = torch.log_softmax(logits / temperature, -1)
            at = slice(done + 1, done + 1 + len(rows))
            picked = torch.from_numpy(tokens[at].astype(np.int64)).to(rows.device)
            logprobs[at] = rows.gather(1, picked[:, None]).squeeze(1).cpu().numpy()
            if top_k:
                ids[at], tops[at] = alternatives(rows, top_k)
            done += len(rows)
        return Scored(logprobs, self._version, ids if top_k else None, tops if top_k else None)

    def _stage(self, receiver: Receiver, update: WeightUpdate) -> ReceivedWeights:
        """The weights of an update, whole and verified."""
        staged = received_weights(receiver, update, self.name, self._base)
        self._model.fit(staged.tensors)
        return staged

    def _commit(self, staged: ReceivedWeights, version: Version) -> None:
        """Serve the staged weights, and verify what is served then."""
        fault_injection.reach(self.name, "commit", version.step)
        self._model.load(staged.tensors)
        if (served := fingerprint(self._model.held(staged.tensors))) != staged.fingerprint:
            raise PolicyMismatch(
                f"engine {self.name} serves weights of the fingerprint {served}, not {version}, of {staged.fingerprint}"
            )
        self._version = version
        if self.settings.in_flight == InFlight.RECOMPUTE:
            for row in self._rows:
                row.cache = None

    @property
    def _running(self) -> int:
        return sum(row.begun for row in self._rows)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(TURN_S):
            while not holds():
                await self._changed.wait()

    def _tell(self) -> None:
        """Wake those who wait for the end of something."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _turn(self, work: Callable[..., T], *given: Any) -> T:
        """Do `work` in the thread that computes. An error there ends the engine."""
        self._check_alive()
        try:
            found, begin, end = await in_thread(partial(self._timed, work, *given), pool=self._computing)
        except Exception as error:
            self._failure = self._failure or EngineFailed(f"engine {self.name} has stopped: {error!r}")
            raise error if isinstance(error, PolicyMismatch) else self._failure from error
        self._activity.step(begin, end)
        self._check_alive()  # it may have been closed meanwhile
        return found

    def _timed(self, work: Callable[..., T], *given: Any) -> tuple[T, float, float]:
        begin = time.monotonic()
        self._cores.take()
        return work(*given), begin, time.monotonic()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
