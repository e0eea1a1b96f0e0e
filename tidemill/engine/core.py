"""The native engine: paged KV, continuous batching, exact behaviour logprobs, weight updates between two steps.

    generate/score/stream -> Request -> scheduler.plan -> run -> record -> Completion

Everything happens in one event loop: `_step` runs while there is work, and between two steps callers get their turn, as does
the staging of weights (a CUDA device is told of it by a thread). So whatever a method does outside of an `await` happens
between two steps, and that is where new weights are committed. Every sampled token is stamped with the version whose step
sampled it (I1).
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from tidemill import faults
from tidemill.cores import Cores
from tidemill.engine.activity import Activity
from tidemill.engine.attention import PagedCache
from tidemill.engine.blocks import BlockManager
from tidemill.engine.cache_size import context_of, device_of, free_memory, kv_pages
from tidemill.engine.cuda import paged_cache
from tidemill.engine.episodes import Episodes
from tidemill.engine.invariant import run_invariant
from tidemill.engine.machine_check import check_machine
from tidemill.engine.requests import Request, Slots, Stream, completion, scored
from tidemill.engine.runner import Output, Probe, Probed, run
from tidemill.engine.scheduler import Chunk, Plan, Salt, Scheduler, Sequence
from tidemill.engine.settings import EngineSettings
from tidemill.engine.turns import in_turns
from tidemill.engine.weights import Staging, Weights, serve
from tidemill.errors import ConfigError
from tidemill.models.architecture import Architecture
from tidemill.models.decoder import Decoder
from tidemill.models.pieces import Work, at_once
from tidemill.models.slices import Receiver
from tidemill.observability.memory import PeakMemory
from tidemill.protocols import Capabilities, EngineFailed, EngineStats, PolicyMismatch
from tidemill.threads import background, in_thread
from tidemill.types import Array, Completion, Finish, InFlight, Published, SamplingParams, Scored, Telemetry, Version

T = TypeVar("T")


class NativeEngine:
    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        *,
        receiver: Receiver | None,
        version: Version,
        name: str,
        eos_ids: tuple[int, ...],
        cores: Cores | None = None,
        cached_versions: int = 2,
    ) -> None:
        """Serves `decoder`, which is cast and moved as `settings` say and belongs to the engine from now on.

        `receiver`: where updates come from; None for an engine that is never updated. `eos_ids` end a completion unless
        its parameters say `ignore_eos`. `cores`: are taken before each step. `cached_versions`: of so many, the
        latest, KV may be found again, since an episode between two turns still has that of the version it began with.
        """
        self.name, self.settings, self.eos_ids = name, settings, eos_ids
        device = device_of(settings.device)
        self._device = torch.device(device)
        if settings.batch_invariant and device != "cpu":
            raise ConfigError(
                f"engine.batch_invariant with device='auto', which is {device!r} here: it is for float32 on the CPU; "
                "set engine.device='cpu', or turn batch_invariant off"
            )
        decoder = decoder.to(self._device, getattr(torch, settings.dtype)).requires_grad_(False)
        self._arch, self._dtype = decoder.arch, decoder.embed.weight.dtype
        pack = not settings.batch_invariant  # those products have a shape of their own
        self._weights = serve(decoder, version, pack)
        if settings.batch_invariant:
            check_machine(self._weights, settings.page_size)
        self._staging = Staging(receiver, pack) if receiver is not None else None
        self._tells_device: ThreadPoolExecutor | None = background("staging") if device == "cuda" else None
        self._cached_versions = cached_versions
        self._versions = [version]  # every version served, in order; tokens are stamped with an index into it
        self._pages = _pages_of(settings, self._arch, device)
        blocks = BlockManager(self._pages, settings.page_size, settings.prefix_cache)
        self._scheduler = Scheduler(blocks, settings.max_sequences, context_of(settings, self._arch), settings.prefill_chunk)
        self._scheduler.salt = _salt(version)
        self._slots = Slots(settings.max_sequences, self._scheduler.context)
        self._cache: PagedCache | None = self._new_cache()  # None while asleep
        self._requests: dict[Sequence, Request] = {}  # everything that waits or runs
        self._by_key: dict[str, set[Request]] = {}
        self._episodes = Episodes()
        self._activity, self._cores = Activity(), cores or Cores()
        self._memory = PeakMemory()
        self._loop: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()  # bounded: an update has its caller's deadline
        self._draining: tuple[Weights, asyncio.Future[None]] | None = None  # a commit that waits for what is in flight
        self._failure: Exception | None = None

    # -- what callers see ------------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        return Capabilities(context=self._scheduler.context, sleep=True)

    async def generate(self, tokens: Array, params: SamplingParams, policy: str, key: str) -> Completion:
        request = self._submit(tokens, params, policy, key, stream=False)
        return await self._result(request)

    def stream(self, tokens: Array, params: SamplingParams, policy: str, key: str) -> Stream:
        """As `generate`, token by token. Close it (`aclose`, or cancel the iteration) to abort."""
        return Stream(self._submit(tokens, params, policy, key, stream=True), self._forget)

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        """`top_k` alternatives at `temperature`; row 0, which nothing predicts, holds ids of -1."""
        if not temperature > 0:
            raise ValueError(f"temperature={temperature!r}: expected a value > 0 to score at")
        tokens = self._check(tokens, policy)
        shape = (len(tokens), min(top_k, self._arch.vocab))
        probed = Probed(np.zeros(len(tokens), np.float32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
        if len(tokens) == 1:
            return scored(probed, self._weights.version)
        sequence = Sequence(tokens, limit=len(tokens), probe=True)
        request = Request(sequence, time.monotonic(), temperature=temperature, top_k=top_k, probed=probed)
        self._enqueue(request)
        return await self._result(request)

    async def update(self, published: Published) -> Version:
        async with self._updating:
            self._check_alive()
            if self._staging is None:
                raise RuntimeError(f"engine {self.name} was built without a receiver: it cannot be updated")
            self._check_forward(published.version)
            faults.reach(self.name, "stage", published.version.step)
            step, staging = published.version.step, self._staging.stage(published, self._weights)
            await self._commit(await self._beside_steps("stage", staging, step=step, bytes=published.bytes))
            try:
                await self._beside_steps("prove", self._staging.prove(self._weights, published.version), step=step)
            except PolicyMismatch as error:
                self._fail(error)  # nobody knows what it serves: nothing more is sampled from it
                raise
            return self._weights.version

    async def abort(self, key: str) -> None:
        for request in list(self._by_key.get(key, ())):
            self._complete(request, Finish.CANCELLED)

    async def sleep(self) -> None:
        """Give the KV memory back. What runs is kept and prefilled again after `wake`; new calls are refused until then."""
        self._check_alive()
        if self._cache is None:
            return
        self._scheduler.preempt_all(renew=False)
        self._scheduler.blocks = BlockManager(self._pages, self.settings.page_size, self.settings.prefix_cache)
        self._cache = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        self._check_alive()
        if self._cache is None:
            self._cache = self._new_cache()
            self._run()

    async def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._activity.counters
        return EngineStats(
            waiting=scheduler.waiting_count,
            running=len(scheduler.running),
            version=self._weights.version,
            kv_used=1 - scheduler.blocks.available / scheduler.blocks.usable,
            generated=int(counters["generated_tokens"]),
            preemptions=scheduler.preemptions,
            prompt_tokens=int(counters["prompt_tokens"]),
            cached_tokens=int(counters["cached_tokens"]),
        )

    def progress(self) -> float:
        return self._activity.counters["steps"]

    async def telemetry(self) -> Telemetry:
        self._activity.counters["preemptions"] = float(self._scheduler.preemptions)
        return Telemetry(self.name, os.getpid(), self._activity.take(), dict(self._activity.counters), self._memory.update())

    async def close(self) -> None:
        """End everything: pending calls fail. Closing twice is fine."""
        if self._failure is None:
            self._fail(EngineFailed(f"engine {self.name} was closed"))
        if self._loop is not None:
            await asyncio.wait([self._loop])  # bounded: by one step
        async with self._updating:  # an update may still be reading the carrier
            if self._staging is not None:
                self._staging.close()
                self._staging = None
        if self._tells_device is not None:
            self._tells_device.shutdown(wait=False)  # bounded: it does not wait
        self._cache = None

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._loop is None or self._loop.done():
            self._activity.idle.begin()
            self._activity.leave()
            self._loop = asyncio.get_running_loop().create_task(self._work(), name=f"engine {self.name}")

    async def _work(self) -> None:
        try:
            self._activity.back()
            while self._cache is not None:
                self._commit_when_drained()
                if not self._requests:
                    break
                self._step(self._cache)
                self._activity.leave()
                await asyncio.sleep(0)
                self._activity.back(between=bool(self._requests))
            begin = time.monotonic()
            self._scheduler.check_integrity()
            self._activity.span("check", begin, time.monotonic())
        except Exception as error:  # whatever it is: nobody may wait for an engine that has stopped
            failed = EngineFailed(f"engine {self.name} has stopped: {error!r}")
            failed.__cause__ = error
            self._fail(failed)
        finally:
            self._cores.leave()
            self._activity.idle.end()

    def _step(self, cache: PagedCache) -> None:
        """Schedule, run, postprocess."""
        faults.reach(self.name, "generate", self._weights.version.step)
        start = time.monotonic()
        self._cores.take()
        plan = self._scheduler.plan()
        if plan is None:
            raise RuntimeError(f"engine {self.name}: {len(self._requests)} requests and nothing to compute")
        for sequence in plan.admitted:
            self._begin(self._requests[sequence], start)
        slots = plan.sample_slots
        positions = self._scheduler.length[slots]
        params = self._slots.params(slots, positions)
        top = int(self._slots.top[slots].max(initial=0))
        compute = run_invariant if self.settings.batch_invariant else run
        probes = [self._probe(c) for c in plan.probes]
        output = compute(self._weights, cache, plan, self._scheduler.table, params, top, probes)
        self._record(plan, output, positions)
        self._activity.step(start, time.monotonic())

    def _begin(self, request: Request, now: float) -> None:
        request.queued_s = now - request.arrived
        self._slots.enter(request.sequence.slot, request)
        if request.params is not None:
            self._activity.counters["prompt_tokens"] += len(request.sequence.prompt)
            self._activity.counters["cached_tokens"] += request.sequence.cached

    def _probe(self, chunk: Chunk) -> Probe:
        request = self._slots.requests[chunk.slot]
        assert request is not None
        targets = request.sequence.prompt[chunk.start + 1 : chunk.start + 1 + chunk.count].astype(np.int64)
        return Probe(chunk.row, chunk.row + chunk.count, targets, request.temperature, request.top_k)

    def _record(self, plan: Plan, output: Output, positions: np.ndarray) -> None:
        slots, rows, sampled = plan.sample_slots, self._slots, output.sampled
        rows.logprobs[slots, positions] = sampled.logprobs
        rows.model_logprobs[slots, positions] = sampled.model_logprobs
        rows.epochs[slots, positions] = len(self._versions) - 1
        self._scheduler.advance(plan, sampled.tokens)
        self._activity.counters["generated_tokens"] += len(slots)
        for i in np.flatnonzero(rows.detailed[slots]).tolist():
            self._record_details(i, int(slots[i]), output)
        stopped = (sampled.tokens[:, None] == rows.stops[slots]).any(axis=1)
        for i in np.flatnonzero(stopped | (positions + 1 >= rows.limit[slots])).tolist():
            request = rows.requests[slots[i]]
            assert request is not None and request.params is not None
            full = len(request.sequence.prompt) + request.params.max_tokens == positions[i] + 1
            self._complete(request, Finish.STOP if stopped[i] else Finish.LENGTH if full else Finish.CONTEXT)
        for chunk, part in zip(plan.probes, output.probed, strict=True):
            self._record_probe(chunk.slot, chunk.start, part)

    def _record_details(self, i: int, slot: int, output: Output) -> None:
        request, sampled = self._slots.requests[slot], output.sampled
        assert request is not None and request.params is not None
        top: list[tuple[int, float]] = []
        if i in sampled.supports:
            request.supports.append(sampled.supports[i])
        if output.top_ids is not None and output.top_logprobs is not None and (count := request.params.top_logprobs):
            ids, logprobs = output.top_ids[i, :count], output.top_logprobs[i, :count]
            request.tops.append((ids, logprobs))
            top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
        if request.stream is not None:
            token, logprob, model = sampled.tokens[i], sampled.logprobs[i], sampled.model_logprobs[i]
            request.stream.put_nowait((int(token), float(logprob), float(model), top))

    def _record_probe(self, slot: int, start: int, part: Probed) -> None:
        """`part` begins with the distribution after position `start`: row 0 is predicted by nothing."""
        request = self._slots.requests[slot]
        assert request is not None and request.probed is not None
        rows = slice(start + 1, start + 1 + len(part.logprobs))
        request.probed.logprobs[rows] = part.logprobs
        request.probed.top_ids[rows], request.probed.top_logprobs[rows] = part.top_ids, part.top_logprobs
        if rows.stop == len(request.probed.logprobs):
            # A commit restarts what is scored, so this one version did it all.
            self._finish(request, scored(request.probed, self._weights.version))

    # -- requests --------------------------------------------------------------------------------------------------

    def _submit(self, tokens: Array, params: SamplingParams, policy: str, key: str, *, stream: bool) -> Request:
        tokens = self._check(tokens, policy)
        stops = params.stop_ids if params.ignore_eos else (*params.stop_ids, *self.eos_ids)
        sequence = Sequence(tokens, limit=len(tokens) + params.max_tokens, last=params.last)
        sequence.salt = self._episodes.salt(key, tokens)
        request = Request(sequence, time.monotonic(), params=params, key=key, stops=tuple(dict.fromkeys(stops)))
        if stream:
            request.stream = asyncio.Queue()
        self._enqueue(request)
        return request

    def _check(self, tokens: Array, policy: str) -> np.ndarray:
        self._check_alive()
        if policy != self._weights.version.policy:
            raise ValueError(
                f"policy {policy!r} is not served here: engine {self.name} serves {self._weights.version.policy!r}"
            )
        if self._cache is None:
            raise RuntimeError(f"engine {self.name} is asleep: call wake() before giving it work")
        tokens = np.ascontiguousarray(tokens)
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"tokens of shape {tokens.shape} and dtype {tokens.dtype}: expected a row of at least one token id"
            )
        if tokens.min() < 0 or tokens.max() >= self._arch.vocab:
            raise ValueError(
                f"token ids from {tokens.min()} to {tokens.max()}: this model knows 0 to {self._arch.vocab - 1}"
            )
        return tokens.astype(np.int32)

    def _enqueue(self, request: Request) -> None:
        self._scheduler.submit(request.sequence)
        request.future = asyncio.get_running_loop().create_future()
        self._requests[request.sequence] = request
        if request.key:
            self._by_key.setdefault(request.key, set()).add(request)
        self._run()

    async def _result(self, request: Request) -> Any:
        assert request.future is not None
        try:
            return await request.future  # bounded: by the tokens asked for, and the caller's deadline
        except asyncio.CancelledError:
            self._forget(request)
            raise

    def _forget(self, request: Request) -> None:
        """It leaves the engine, wherever it stands."""
        if self._requests.pop(request.sequence, None) is None:
            return
        self._scheduler.release(request.sequence)
        if request.key:
            siblings = self._by_key[request.key]
            siblings.discard(request)
            if not siblings:
                del self._by_key[request.key]

    def _finish(self, request: Request, result: Completion | Scored) -> None:
        self._forget(request)
        future: Any = request.future
        if not future.done():
            future.set_result(result)
        if request.stream is not None:
            request.stream.put_nowait(None)

    def _complete(self, request: Request, finish: Finish) -> None:
        sequence, slot = request.sequence, request.sequence.slot
        length = int(self._scheduler.length[slot]) if slot >= 0 else 0  # without a slot it never ran
        if self.settings.in_flight == InFlight.KEEP and request.key and sequence.salt is not None and not sequence.last:
            self._episodes.remember(request.key, sequence.salt, self._scheduler.tokens[slot, :length])
        tokens = self._scheduler.tokens[slot, len(sequence.prompt) : length]
        self._finish(request, completion(request, finish, tokens, self._slots, self._versions, self.name))

    # -- weights ---------------------------------------------------------------------------------------------------

    def _check_forward(self, new: Version) -> None:
        now = self._weights.version
        if new.policy != now.policy:
            raise PolicyMismatch(f"{new} is not of the policy that engine {self.name} serves ({now})")
        if (new.incarnation, new.step) < (now.incarnation, now.step):
            raise PolicyMismatch(f"{new} is older than {now}, which engine {self.name} serves: versions only go forward")

    async def _beside_steps(self, name: str, work: Work[T], **args: float) -> T:
        if self._tells_device is not None:
            with self._activity.beside(name, **args):
                return await in_thread(at_once, work, pool=self._tells_device)
        return await in_turns(work, lambda begin, end: self._activity.span(name, begin, end, **args), self._check_alive)

    async def _commit(self, staged: Weights) -> None:
        self._check_alive()
        if self.settings.in_flight == InFlight.FINISH and self._scheduler.in_flight:
            if self._cache is None:
                raise RuntimeError(f"engine {self.name} is asleep with sequences in flight: wake() it, they finish first")
            self._scheduler.admitting = False
            drained = asyncio.get_running_loop().create_future()
            self._draining = (staged, drained)
            try:
                await drained  # bounded: by the longest sequence in flight, and the caller's deadline
            finally:
                self._draining, self._scheduler.admitting = None, True
        else:
            self._swap(staged)

    def _commit_when_drained(self) -> None:
        if self._draining is not None and not self._scheduler.in_flight:
            (staged, drained), self._draining = self._draining, None
            self._swap(staged)
            self._scheduler.admitting = True
            drained.set_result(None)

    def _swap(self, staged: Weights) -> None:
        """The commit: the next step runs on `staged`."""
        assert self._staging is not None
        faults.reach(self.name, "commit", staged.version.step)
        begin = time.monotonic()
        self._staging.retire(self._weights)
        self._weights = staged
        self._versions.append(staged.version)
        before, self._scheduler.salt = self._scheduler.salt, _salt(staged.version)
        self._scheduler.blocks.retire({_salt(version) for version in self._versions[-self._cached_versions :]})
        if self.settings.in_flight == InFlight.RECOMPUTE:
            self._scheduler.preempt_all(renew=True)
        else:
            self._begin_again(before)
        self._activity.span("commit", begin, time.monotonic(), step=staged.version.step)

    def _begin_again(self, before: Salt) -> None:
        """What is scored, and what began under the weights of `before` and has sampled nothing yet, starts again: all its
        tokens are of the new version, so its KV must be too."""
        scheduler = self._scheduler
        for sequence in [s for s in scheduler.running.values() if s.probe or self._only_prompt(s, before)]:
            scheduler.preempt(sequence)
        for sequence in scheduler.waiting:
            if self._only_prompt(sequence, before):
                sequence.salt = None

    def _only_prompt(self, sequence: Sequence, salt: Salt) -> bool:
        """It has begun, under this salt, and has sampled nothing yet."""
        begun = sequence.slot >= 0 and not sequence.released and sequence.salt == salt
        return begun and self._scheduler.length[sequence.slot] == len(sequence.prompt)

    # -- ends and means --------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _fail(self, error: Exception) -> None:
        """Everybody who waits gets `error`, and whoever comes later is told."""
        if self._failure is None:
            self._failure = error
        for request in list(self._requests.values()):
            self._forget(request)
            assert request.future is not None
            if not request.future.done():
                request.future.set_exception(error)
            if request.stream is not None:
                request.stream.put_nowait(None)
        if self._draining is not None and not self._draining[1].done():
            self._draining[1].set_exception(error)

    def _new_cache(self) -> PagedCache:
        return paged_cache(self._arch, self._pages, self.settings.page_size, self._dtype, self._device)


def _pages_of(settings: EngineSettings, arch: Architecture, device: str) -> int:
    pages, _ = kv_pages(settings, arch, free_memory(device))
    if pages < 2:
        raise ValueError(
            f"kv_memory_mb={settings.kv_memory_mb}: less than two pages of {settings.page_size} tokens: give the cache more"
        )
    return pages


def _salt(version: Version) -> Salt:
    return version.incarnation, version.step
