"""Requests under way: an `ActiveRequest` for each call, their table, and arrays for sampled data.

The arrays are indexed by [slot, position], so that a step records its whole batch in a few NumPy assignments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.core.sampling_support import SupportRecord
from tidemill.core.token_extras import MODEL_LOGPROBS
from tidemill.core.types import Completion, Finish, SamplingParams, Scored, Version
from tidemill.engine.native.grammars import HeldReply
from tidemill.engine.native.runner import Output, Probe, Probed
from tidemill.engine.native.sampler import Adjustment, RowParams, mixed, uniforms
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.step_plan import Chunk, Sequence

EXTRAS = (MODEL_LOGPROBS,)
"""The token extras that this engine returns; `Slots` has an array of that name for each."""

Token = tuple[int, float, float | None, list[tuple[int, float]]]
"""(token, logprob, model logprob, [(alternative, its model logprob)])"""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One call of the engine. `params` is None for a score."""

    sequence: Sequence
    arrived: float  # monotonic seconds
    params: SamplingParams | None = None
    key: str = ""
    stops: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()  # names of those of `EXTRAS` that the completion carries
    future: asyncio.Future[Completion] | asyncio.Future[Scored] | None = None
    stream: asyncio.Queue[Token | None] | None = None  # a None in it means that the future is done
    queued_s: float = 0.0
    first_token_s: float = 0.0
    prompt_key: bytes = b""  # see `drafts.key_of`; empty until it is needed
    held: HeldReply | None = None  # for a reply that is held to a grammar
    record: SupportRecord | None = field(init=False)  # what its tokens are sampled from, if not the whole vocabulary
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    temperature: float = 1.0  # temperature of a score
    top_k: int = 0
    probed: Probed | None = None  # rows by position

    def __post_init__(self) -> None:
        p = self.params
        chosen = p is not None and p.temperature > 0  # a greedy token is chosen from no distribution
        partly = p is not None and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0 or self.held is not None)
        self.record = SupportRecord() if chosen and partly else None

    @property
    def detailed(self) -> bool:
        """True when its tokens need more than the per-slot arrays."""
        listed = self.params is not None and self.params.top_logprobs > 0
        return self.stream is not None or self.record is not None or listed


class Slots:
    """Per-slot arrays: each running row's sampling parameters, and its sampled tokens' data."""

    def __init__(self, slots: int, context: int) -> None:
        self.requests: list[ActiveRequest | None] = [None] * slots
        self.limit = np.zeros(slots, np.int64)
        self.temperature, self.top_p, self.min_p = np.ones(slots), np.ones(slots), np.zeros(slots)
        self.top_k, self.top = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.uint64)  # mixed
        self.detailed = np.zeros(slots, bool)
        self.adjusted = np.zeros(slots, bool)
        self.held = np.zeros(slots, bool)  # to a grammar
        self.fresh = np.zeros(slots, bool)  # True until its first token is sampled
        self.stops = [
            np.full(slots, -1, np.int64)
        ]  # the first of each, the second and so on: -1, which no token is, fills up
        # Zeroed lazily by the system: only used parts take memory.
        self.logprobs = np.zeros((slots, context), np.float32)
        self.model_logprobs = np.zeros((slots, context), np.float32)
        self.epochs = np.zeros((slots, context), np.int32)  # index of the version that sampled it

    def enter(self, slot: int, request: ActiveRequest) -> None:
        """Set a slot's parameters for a request."""
        self.requests[slot] = request
        self.limit[slot] = request.sequence.limit
        if (params := request.params) is None:
            return
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = params.temperature, params.top_p, params.min_p
        self.top_k[slot], self.top[slot] = params.top_k, params.top_logprobs
        self.seed[slot] = mixed(np.array([params.seed % 2**64], np.uint64))[0]
        self.detailed[slot], self.adjusted[slot], self.fresh[slot] = request.detailed, params.adjusted, True
        self.held[slot] = request.held is not None
        while len(request.stops) > len(self.stops):
            self.stops.append(np.full_like(self.limit, -1))
        for i, stops in enumerate(self.stops):
            stops[slot] = request.stops[i] if i < len(request.stops) else -1

    def params(self, slots: np.ndarray, positions: np.ndarray) -> RowParams:
        return RowParams(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            uniform=uniforms(self.seed[slots], positions),
        )

    def adjustments(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> dict[int, Adjustment]:
        """Adjustments of the rows that change their logits.

        tokens: [slot, position], known below each row's position.
        """
        found: dict[int, Adjustment] = {}
        for i in np.flatnonzero(self.adjusted[slots]).tolist():
            request, row = self.requests[slots[i]], tokens[slots[i]]
            assert request is not None and request.params is not None
            begin = len(request.sequence.prompt)
            found[i] = Adjustment(request.params, request.stops, row[:begin], row[begin : positions[i]])
        return found

    def masks(
        self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, np.ndarray], list[tuple[ActiveRequest, ValueError]]]:
        """Masks of the rows that are held to a grammar, and the requests that cannot be followed further.

        tokens: [slot, position], known below each row's position.
        """
        found, failed = dict[int, np.ndarray](), list[tuple[ActiveRequest, ValueError]]()
        for i in np.flatnonzero(self.held[slots]).tolist():
            request = self.requests[slots[i]]
            assert request is not None and request.held is not None
            try:
                found[i] = request.held.allowed(tokens[slots[i], len(request.sequence.prompt) : positions[i]])
            except ValueError as error:
                failed.append((request, error))
        return found, failed

    def stopped(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """True, [n] bool, for rows that end with their token."""
        found = tokens == self.stops[0][slots]
        for stops in self.stops[1:]:
            found |= tokens == stops[slots]
        return found


class RequestTable:
    """Every request that waits or runs. A request leaves the scheduler and the table together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.under_way: dict[Sequence, ActiveRequest] = {}
        self._scheduler = scheduler
        self._by_key: dict[str, set[ActiveRequest]] = {}

    def of_key(self, key: str) -> list[ActiveRequest]:
        """The requests of one key now."""
        return list(self._by_key.get(key, ()))

    def add(self, request: ActiveRequest) -> None:
        """Submit a request to the scheduler, and give it a future."""
        self._scheduler.submit(request.sequence)
        request.future = asyncio.get_running_loop().create_future()
        self.under_way[request.sequence] = request
        if request.key:
            self._by_key.setdefault(request.key, set()).add(request)

    def forget(self, request: ActiveRequest) -> None:
        """Remove a request from the engine, wherever it stands."""
        if self.under_way.pop(request.sequence, None) is None:
            return
        self._scheduler.release(request.sequence)
        if request.key:
            siblings = self._by_key[request.key]
            siblings.discard(request)
            if not siblings:
                del self._by_key[request.key]

    def finish(self, request: ActiveRequest, result: Completion | Scored) -> None:
        """Remove a request, and give its caller the result."""
        self.forget(request)
        future: Any = request.future
        if not future.done():
            future.set_result(result)
        if request.stream is not None:
            request.stream.put_nowait(None)

    def refuse(self, request: ActiveRequest, error: Exception) -> None:
        """Remove a request, and raise `error` in its caller."""
        self.forget(request)
        assert request.future is not None
        if not request.future.done():
            request.future.set_exception(error)
        if request.stream is not None:
            request.stream.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Remove every request, and raise `error` in its caller."""
        for request in list(self.under_way.values()):
            self.refuse(request, error)


class Stream(AsyncIterator[Token]):
    """The tokens of one call as they are sampled. Closing it aborts.

    When it is exhausted, `completion` holds the whole.
    """

    def __init__(self, request: ActiveRequest, end: Callable[[ActiveRequest], None]) -> None:
        self._request, self._end = request, end
        self.completion: Completion | None = None

    async def __anext__(self) -> Token:
        assert self._request.stream is not None and self._request.future is not None
        if self.completion is not None:
            raise StopAsyncIteration
        try:
            token = await self._request.stream.get()  # bounded: an engine that fails fails its requests
        except asyncio.CancelledError:
            self._end(self._request)
            raise
        if token is not None:
            return token
        # bounded: it is set before the stream ends
        result = await self._request.future  # done: this returns or raises at once
        assert isinstance(result, Completion)
        self.completion = result
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._end(self._request)


def completion(
    request: ActiveRequest, finish: Finish, tokens: np.ndarray, slots: Slots, versions: list[Version], engine: str
) -> Completion:
    """The record of a request: its sampled `tokens` [n], and the slots' data about them."""
    slot, first = request.sequence.slot, len(request.sequence.prompt)
    row = slice(first, first + len(tokens))
    epochs = slots.epochs[slot, row]
    begins = [0, *(np.flatnonzero(epochs[1:] != epochs[:-1]) + 1).tolist()] if len(epochs) else []
    sources, steps = tuple(versions[e] for e in epochs[begins]), np.empty(len(epochs), np.int32)
    for begin, source in zip(begins, sources, strict=True):  # versions only go forward
        steps[begin:] = source.step
    tops = request.tops
    return Completion(
        tokens=tokens.copy(),
        logprobs=slots.logprobs[slot, row].copy(),
        versions=steps,
        sources=sources,
        finish=finish,
        prompt_tokens=first,
        cached_tokens=request.sequence.cached,
        support=None if request.record is None else request.record.support(),
        top_ids=np.stack([ids for ids, _ in tops]) if tops else None,
        top_logprobs=np.stack([logprobs for _, logprobs in tops]) if tops else None,
        queued_s=request.queued_s,
        first_token_s=request.first_token_s,
        engine=engine,
        extras={name: getattr(slots, name)[slot, row].copy() for name in request.extras},
    )


def to_score(tokens: np.ndarray, policy: int, temperature: float, top_k: int) -> ActiveRequest:
    """The request for logprobs of `tokens` [T] by a policy, given by its number."""
    shape = (len(tokens), top_k)
    probed = Probed(np.zeros(len(tokens), np.float32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
    sequence = Sequence(tokens, limit=len(tokens), policy=policy, probe=True)
    return ActiveRequest(sequence, time.monotonic(), temperature=temperature, top_k=top_k, probed=probed)


def scored(probed: Probed | None, version: Version) -> Scored:
    assert probed is not None
    wanted = probed.top_ids.shape[1] > 0
    return Scored(probed.logprobs, version, probed.top_ids if wanted else None, probed.top_logprobs if wanted else None)


def probe_of(request: ActiveRequest | None, chunk: Chunk) -> Probe:
    """The tokens of a chunk that are scored, as the runner takes them."""
    assert request is not None
    targets = request.sequence.prompt[chunk.start + 1 : chunk.start + 1 + chunk.count].astype(np.int64)
    return Probe(chunk.row, chunk.row + chunk.count, targets, request.temperature, request.top_k)


def record_probe(request: ActiveRequest | None, start: int, part: Probed) -> ActiveRequest | None:
    """Store scored logprobs; `part` begins with the distribution after position `start`.

    Returns the request if these were its last ones.
    """
    assert request is not None and request.probed is not None
    probed, rows = request.probed, slice(start + 1, start + 1 + len(part.logprobs))
    probed.logprobs[rows] = part.logprobs
    probed.top_ids[rows], probed.top_logprobs[rows] = part.top_ids, part.top_logprobs
    return request if rows.stop == len(probed.logprobs) else None


def record_details(request: ActiveRequest | None, i: int, output: Output) -> None:
    """Store the support, the alternatives and the streamed token of sampled row `i`."""
    assert request is not None and request.params is not None
    sampled, top = output.sampled, list[tuple[int, float]]()
    if request.record is not None and i in sampled.supports:
        request.record.add(sampled.supports[i])
    elif request.record is not None and request.held is not None:
        request.record.add_mask(request.held.kept)
    if output.top_ids is not None and output.top_logprobs is not None and (count := request.params.top_logprobs):
        ids, logprobs = output.top_ids[i, :count], output.top_logprobs[i, :count]
        request.tops.append((ids, logprobs))
        top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    if request.stream is not None:
        token, logprob, model = sampled.tokens[i], sampled.logprobs[i], sampled.model_logprobs[i]
        request.stream.put_nowait((int(token), float(logprob), float(model), top))
