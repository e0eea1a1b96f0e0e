"""The native engine: paged KV cache, continuous batching, exact behaviour logprobs.

    generate/score/stream -> Request -> scheduler.plan -> run -> record -> Completion

Everything happens in one event loop: `_step` runs while there is work, and between two steps callers get their turn, as do
`weight_updates`. Code outside of an `await` runs between two steps. Each sampled token is stamped with the version whose
step sampled it (I1). While it sleeps it has no cache and takes no steps; what it is asked waits.

On a device the next step is launched before the tokens of this one are read (`_settle`). It leaves out rows that reach their
limit. Rows that turn out to have stopped are computed in vain. Code that changes weights, or needs the tokens so far,
settles first.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tidemill.core import fault_injection
from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, InFlight, Scored, Telemetry, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.native.activity import Activity
from tidemill.engine.native.adapter_staging import SidePolicies
from tidemill.engine.native.batch_invariant import check_machine, run_invariant
from tidemill.engine.native.cache_size import pages_of
from tidemill.engine.native.cuda_graphs import paged_cache
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.first_weights import first_weights, placed
from tidemill.engine.native.grammars import Grammars
from tidemill.engine.native.kept_conversations import KeptConversations
from tidemill.engine.native.kv_blocks import BlockManager
from tidemill.engine.native.paged_attention import PagedCache
from tidemill.engine.native.request_state import (
    EXTRAS,
    ActiveRequest,
    RequestTable,
    Slots,
    Stream,
    completion,
    probe_of,
    record_details,
    record_probe,
    scored,
    to_score,
)
from tidemill.engine.native.runner import Output, UnderWay, launch, run
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.speculation import Speculation
from tidemill.engine.native.step_plan import Plan, Sequence
from tidemill.engine.native.weight_updates import WeightUpdater
from tidemill.engine.request_refusals import check_request, check_temperature, checked_tokens
from tidemill.models.decoder import Decoder
from tidemill.models.host_memory import give_back
from tidemill.models.weight_slices import Receiver
from tidemill.observability.process_memory import PeakMemory
from tidemill.runtime.cpu_sharing import Cores


class NativeEngine:
    """`interfaces.Engine` on this project's own models."""

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        *,
        receiver: Receiver | None,
        version: Version | SidePolicies,
        name: str,
        eos_ids: tuple[int, ...],
        cores: Cores | None = None,
        cached_versions: int = 2,
        spare: bool = True,
        adapted: bool = False,
        spelling: Callable[[], list[bytes]] | None = None,
    ) -> None:
        """Serve `decoder`, which is cast and moved as `settings` say and belongs to the engine from now on.

        receiver: source of updates; None for an engine that is never updated. version: of these weights; or several
        policies, which are adapters of them and are served side by side. eos_ids: end a completion unless its
        parameters say `ignore_eos`. cores: taken before each step. cached_versions: how many recent versions keep their
        prefix cache; an episode between two turns still has KV of the version it began with. spare: take the memory of the
        next version's weights now. adapted: versions are adapters, which are added to the decoder's weights.
        spelling: the bytes of each token id, to hold replies to a grammar; None: none can be held here.
        """
        self.name, self.settings, self.eos_ids = name, settings, eos_ids
        decoder, device = placed(decoder, settings)
        self._device = torch.device(device)
        self._arch, self._dtype = decoder.arch, decoder.embed.weight.dtype
        pack = not settings.batch_invariant  # those products have a shape of their own
        weights, staging, served = first_weights(
            decoder, version, receiver, name, pack=pack, spare=spare, adapted=adapted, cached_versions=cached_versions
        )
        if settings.batch_invariant:
            check_machine(weights, settings.page_size)
        self._pages = pages_of(settings, self._arch, device)
        blocks = BlockManager(self._pages, settings.page_size, settings.prefix_cache)
        context, salts = settings.context_of(self._arch.context), [each.key for each in served.every]
        self._scheduler = Scheduler(blocks, settings.max_sequences, context, settings.prefill_chunk, salts)
        self._slots = Slots(settings.max_sequences, self._scheduler.context)
        self._cache: PagedCache | None = self._new_cache()  # None while asleep
        self._requests = RequestTable(self._scheduler)  # everything that waits or runs
        self.grammars, self._episodes = Grammars(name, spelling), KeptConversations()
        self._speculation = Speculation(settings.speculation, settings.max_sequences)
        self._activity, self._cores = Activity(), cores or Cores()
        self._updates = WeightUpdater(
            weights,
            staging,
            served,
            self._scheduler,
            self._activity,
            name=name,
            in_flight=InFlight(settings.in_flight),
            check=self._check_alive,
            settle=self._settle,
        )
        self._memory = PeakMemory()
        self._under_way: UnderWay | None = None
        self._loop: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def capabilities(self) -> Capabilities:
        several, takes = not self.settings.batch_invariant, self._updates.takes
        context, holds = self._scheduler.context, self.grammars.available
        return Capabilities(context, extras=EXTRAS, constraint=holds, sleep=True, policies=several, updates=takes)

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.grammars.compiled(request.constraint)
        return await self._result(self._submit(request, stream=False))

    def stream(self, request: GenerateRequest) -> Stream:
        """Sample as `generate` does, token by token, after `grammars.compiled`. Close it, or cancel its iteration."""
        return Stream(self._submit(request, stream=True), self._requests.forget)

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        """Logprobs of given tokens, and `top_k` alternatives, at `temperature`.

        Row 0, which nothing predicts, holds ids of -1. Raises ValueError for tokens or a temperature that cannot be scored.
        """
        check_temperature(temperature)
        tokens, number = self._check(tokens, policy)
        request = to_score(tokens, number, temperature, min(top_k, self._arch.vocab))
        if len(tokens) == 1:
            return scored(request.probed, self._updates.served.present(number))
        self._requests.add(request)
        self._run()
        return await self._result(request)

    async def update(self, update: WeightUpdate) -> Version:
        return await self._updates.update(update, self._fail)

    async def abort(self, key: str) -> None:
        self._settle()
        for request in self._requests.of_key(key):
            slot = request.sequence.slot
            length = int(self._scheduler.length[slot]) if slot >= 0 else 0  # without a slot it never ran
            self._complete(request, Finish.CANCELLED, length)

    async def sleep(self, weights: bool = False) -> None:
        self._check_alive()
        if weights:
            self._updates.expect_updates()
        async with self._updates.one_at_a_time:  # bounded: by an update, and the caller's deadline
            await self._updates.between_steps(self._fall_asleep)
            if weights:
                self._updates.forget()
        give_back(self._device)

    def _fall_asleep(self) -> None:
        if self._cache is not None:
            self._settle()
            self._scheduler.preempt_all()
            self._activity.fall_asleep(self._scheduler.blocks.cached_tokens)
            self._scheduler.blocks = BlockManager(self._pages, self.settings.page_size, self.settings.prefix_cache)
            self._cache = None

    async def wake(self) -> None:
        self._check_alive()
        await self._updates.remember(self._fail)
        if self._cache is None:
            self._cache = self._new_cache()
            self._activity.wake_up()
            self._run()

    async def stats(self) -> EngineStats:
        return self._activity.stats(self._scheduler, self._updates.served.latest)

    @property
    def pages(self) -> int:
        """KV pages that sequences can have."""
        return self._scheduler.blocks.usable

    @property
    def alive(self) -> bool:
        return self._failure is None

    def progress(self) -> float:
        """Steps taken and seconds slept: an engine that sleeps is not stuck."""
        return self._activity.counters["steps"] + self._activity.slept_s

    async def telemetry(self) -> Telemetry:
        self._activity.counters["preemptions"] = float(self._scheduler.preemptions)
        return Telemetry(self.name, os.getpid(), self._activity.take(), dict(self._activity.counters), self._memory.update())

    async def close(self) -> None:
        """End everything: pending calls fail. Closing twice is fine."""
        if self._failure is None:
            self._fail(EngineFailed(f"engine {self.name} was closed"))
        if self._loop is not None:
            await asyncio.wait([self._loop])  # bounded: by one step
        await self._updates.close()
        self.grammars.close()
        self._cache = None

    def _run(self) -> None:
        if self._cache is not None and (self._loop is None or self._loop.done()):
            self._activity.idle.begin()
            self._activity.leave()
            self._loop = asyncio.get_running_loop().create_task(self._work(), name=f"engine {self.name}")

    async def _work(self) -> None:
        try:
            self._activity.back()
            while True:
                self._updates.act_when_drained()
                if self._cache is None or not self._requests.under_way:
                    break
                self._step(self._cache)
                self._activity.leave()
                await asyncio.sleep(0)
                self._activity.back(between=bool(self._requests.under_way))
            self._settle()
            self._activity.check(self._scheduler.check_integrity)
        except Exception as error:  # any error fails all requests: none may wait for a stopped engine
            self._stop(error)
        finally:
            self._cores.leave()
            self._activity.idle.end()

    def _step(self, cache: PagedCache) -> None:
        """Schedule a step, run it, and record the tokens of the previous one if it ran ahead."""
        fault_injection.reach(self.name, "generate", self._updates.served.latest.step)
        start = time.monotonic()
        self._cores.take()
        ran = self._under_way is not None
        if ran and self._scheduler.may_preempt():
            self._settle()
        drafts = None
        if self._speculation.due(self._scheduler, cache.ahead):
            self._settle()
            drafts = self._speculation.propose(self._scheduler, self._slots)
        if (plan := self._scheduler.plan(drafts)) is not None:
            for sequence in plan.admitted:
                self._begin(self._requests.under_way[sequence], start)
            launched, known = self._launch(cache, plan)
            self._settle()
            self._under_way = launched
            if known:
                self._settle()
        elif self._under_way is not None:  # whatever runs ends with it
            self._settle()
        elif not ran:
            raise RuntimeError(f"engine {self.name}: {len(self._requests.under_way)} requests and nothing to compute")
        self._activity.step(start, time.monotonic())

    def _launch(self, cache: PagedCache, plan: Plan) -> tuple[UnderWay, bool]:
        """Launch a step. Returns it, and True if it is already computed."""
        slots, weights, table = plan.sample_slots, self._updates.weights, self._scheduler.table
        params = self._slots.params(slots, plan.sample_positions)
        if self._slots.adjusted[slots].any():  # a step that samples for them is never ahead: their replies are known
            params.adjustments = self._slots.adjustments(slots, plan.sample_positions, self._scheduler.tokens)
        params.masks, stuck = self._slots.masks(slots, plan.sample_positions, self._scheduler.tokens)  # never ahead, either
        top = int(self._slots.top[slots].max(initial=0))
        probes = [probe_of(self._slots.requests[c.slot], c) for c in plan.probes]
        waits = top or probes or params.adjustments or params.masks or params.truncated.any() or (plan.drafted >= 0).any()
        if ahead := cache.ahead and not waits:
            read = launch(weights, cache, plan, table, params)
        else:
            compute = run_invariant if self.settings.batch_invariant else run
            output = compute(weights, cache, plan, table, params, top, probes)
            read = lambda: output  # noqa: E731
        self._scheduler.advance(plan)
        for request, error in stuck:  # what the step samples for it does not count
            self._requests.refuse(request, error)
        return UnderWay(plan, self._updates.served.epochs[plan.policies[plan.sample_rows]], read), not ahead

    def _settle(self) -> None:
        """Wait for the step under way, record its tokens, and finish the requests that end with it."""
        if (step := self._under_way) is not None:
            self._under_way = None
            try:
                output = step.read()
            except Exception as error:  # every request waits for this step, not only the caller's
                self._stop(error)
                raise
            self._record(step.plan, output, step.epochs)

    def _begin(self, request: ActiveRequest, now: float) -> None:
        request.queued_s = now - request.arrived
        self._slots.enter(request.sequence.slot, request)
        if request.params is not None:
            self._activity.counters["prompt_tokens"] += len(request.sequence.prompt)
            self._activity.counters["cached_tokens"] += request.sequence.cached

    def _record(self, plan: Plan, output: Output, epochs: np.ndarray) -> None:
        rows, sampled = self._slots, output.sampled
        here = self._scheduler.learn(plan, sampled.tokens)
        self._activity.count(**self._speculation.learn(plan, here))
        slots, positions, tokens = plan.sample_slots[here], plan.sample_positions[here], sampled.tokens[here]
        rows.logprobs[slots, positions] = sampled.logprobs[here]
        rows.model_logprobs[slots, positions] = sampled.model_logprobs[here]
        rows.epochs[slots, positions] = epochs[here]
        self._activity.counters["generated_tokens"] += len(slots)
        for slot in slots[rows.fresh[slots]].tolist():
            rows.fresh[slot], request = False, rows.requests[slot]
            assert request is not None
            request.first_token_s = time.monotonic() - request.arrived
        for i in np.flatnonzero(rows.detailed[slots]).tolist():
            record_details(rows.requests[slots[i]], int(here[i]), output)
        stopped, lengths = rows.stopped(slots, tokens), positions + 1
        for i in np.flatnonzero(stopped | (lengths >= rows.limit[slots])).tolist():
            request, length = rows.requests[slots[i]], int(lengths[i])
            assert request is not None and request.params is not None
            full = len(request.sequence.prompt) + request.params.max_tokens == length
            self._complete(request, Finish.STOP if stopped[i] else Finish.LENGTH if full else Finish.CONTEXT, length)
        for chunk, part in zip(plan.probes, output.probed, strict=True):
            if (done := record_probe(rows.requests[chunk.slot], chunk.start, part)) is not None:
                # A commit restarts what is scored, so this one version did it all.
                self._requests.finish(done, scored(done.probed, self._updates.served.present(done.sequence.policy)))

    def _submit(self, asked: GenerateRequest, *, stream: bool) -> ActiveRequest:
        check_request(asked, self.name, EXTRAS, holds=True)
        (tokens, policy), params, key = self._check(asked.tokens, asked.policy), asked.params, asked.key
        stops = tuple(dict.fromkeys(params.stop_ids if params.ignore_eos else (*params.stop_ids, *self.eos_ids)))
        sequence = Sequence(tokens, limit=len(tokens) + params.max_tokens, policy=policy, last=params.last)
        sequence.salt = self._episodes.salt(key, asked.policy, tokens)
        held = self.grammars.begin(asked.constraint, stops)
        request = ActiveRequest(sequence, time.monotonic(), params, key, stops, asked.extras, held=held)
        if stream:
            request.stream = asyncio.Queue()
        self._requests.add(request)
        self._run()
        return request

    def _check(self, tokens: Array, policy: str) -> tuple[np.ndarray, int]:
        """The tokens, and the number of the policy. Raises ValueError for what cannot be computed here."""
        self._check_alive()
        number = self._updates.served.number(policy, self.name)
        return checked_tokens(tokens, self._arch.vocab), number

    async def _result(self, request: ActiveRequest) -> Any:
        assert request.future is not None
        try:
            return await request.future  # bounded: by the tokens asked for, and the caller's deadline
        except asyncio.CancelledError:
            self._requests.forget(request)
            raise

    def _complete(self, request: ActiveRequest, finish: Finish, length: int) -> None:
        """Finish a request with its completion. length: its known tokens, the prompt included."""
        sequence, slot = request.sequence, request.sequence.slot
        if self.settings.in_flight == InFlight.KEEP and request.key and sequence.salt is not None and not sequence.last:
            self._episodes.remember(request.key, sequence.salt, self._scheduler.tokens[slot, :length])
        tokens = self._scheduler.tokens[slot, len(sequence.prompt) : length]
        self._speculation.finished(request, tokens)
        versions = self._updates.served.every
        self._requests.finish(request, completion(request, finish, tokens, self._slots, versions, self.name))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _stop(self, error: Exception) -> None:
        """Fail every request after a step went wrong."""
        failed = EngineFailed(f"engine {self.name} has stopped: {error!r}")
        failed.__cause__ = error
        self._fail(failed)

    def _fail(self, error: Exception) -> None:
        """Fail every waiting request with `error`, and all later ones."""
        if self._failure is None:
            self._failure = error
        self._requests.fail(error)
        self._updates.fail(error)

    def _new_cache(self) -> PagedCache:
        return paged_cache(self._arch, self._pages, self.settings.page_size, self._dtype, self._device)
