"""An engine that is a vLLM server: `interfaces.Engine` over its routes for tokens, pauses and updates.

    generate -> admission -> POST /inference/v1/generate -> spans of weight versions -> Completion

The server starts when the engine is made, and every call waits until it is ready. When the server fails or ends, so does
the engine: whatever was asked raises EngineFailed, and the supervisor starts both anew.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import (
    Array,
    Completion,
    Finish,
    GenerateRequest,
    InFlight,
    SamplingParams,
    Scored,
    Telemetry,
    Version,
)
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.native.kept_conversations import KeptConversations
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.server_process import ServerProcess
from tidemill.engine.request_refusals import check_length, check_policy, check_request, check_temperature, checked_tokens
from tidemill.engine.vllm.admission import Admission
from tidemill.engine.vllm.server_routes import ServerRoutes
from tidemill.engine.vllm.server_updates import VllmUpdater
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.engine.vllm.wire import (
    GENERATE,
    PREFIX,
    check_params,
    completion_of,
    generate_body,
    score_body,
    scored_of,
    spans_of,
)
from tidemill.observability.process_memory import PeakMemory
from tidemill.observability.timeline import Beside, Idle

T = TypeVar("T")
ANSWER_S = 3600.0  # for a completion; the caller has a deadline of its own
WATCH_S = 1.0  # between two readings of the server's counters while it works
LAST_WORDS_S = 1.0  # for the end of a server's process to be noticed after its connections broke


class VllmEngine:
    """One server, and what this engine asked of it."""

    def __init__(
        self,
        client: ServerClient,
        settings: VllmSettings,
        *,
        process: ServerProcess | None,
        version: Version,
        transport: str | None,
        takes: UpdateSupport,
        eos_ids: tuple[int, ...],
        vocab: int,
        context: int,
        name: str,
    ) -> None:
        """Begin to start, in a running event loop.

        process: the server, if it is this engine's own. version: that of the weights that it begins with. context: tokens
        that a sequence may hold, at most.
        """
        self.name, self.settings, self._eos, self._vocab = name, settings, eos_ids, vocab
        self._client, self._process, self._routes = client, process, ServerRoutes(client)
        self._transport, self._context, self._model = transport, context, ""
        self._admission, self._episodes = Admission(settings.max_sequences), KeptConversations()
        self._salts = dict[PolicyKey, str]()
        self._nonce, self._numbers = secrets.token_hex(8), itertools.count()
        self._by_key = dict[str, dict[str, asyncio.Future[bool]]]()  # requests under way by key: their ids and places
        self._beside, self._idle, self._memory = Beside(), Idle(), PeakMemory()
        self._counts, self._server, self._before = Counter[str](), Counter[str](), Counter[str]()
        self._calls, self._span = 0, 0  # samples and scores under way, the span of their time
        self._failure: Exception | None = None
        self._updates = VllmUpdater(
            self._routes,
            self._admission,
            version,
            takes,
            name=name,
            in_flight=InFlight(settings.in_flight),
            audit_every=settings.audit_every,
            span=self._beside.span,
            fail=self._fail,
        )
        loop = asyncio.get_running_loop()
        self._ready = loop.create_task(self._start(), name=f"start of {name}")
        self._watching = loop.create_task(self._watch(), name=f"watch of {name}")

    async def capabilities(self) -> Capabilities:
        await self._up()
        return Capabilities(
            self._context,
            support=False,
            scores_at=1.0,
            proof="served" if self.settings.audit_every == 1 else "received",
            updates=self._updates.takes,
            receivers=self.settings.tensor_parallel,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        check_request(request, self.name, ())
        check_params(request.params, self.name)
        tokens = await self._checked(request.tokens, request.policy, reply=1)
        request = replace(request, tokens=tokens)
        with self._busy():
            return await self._whole(lambda: self._sample(request))

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        check_temperature(temperature)
        if temperature != 1:
            raise ValueError(
                f"temperature={temperature:g}: vLLM gives the logprobs of given tokens at temperature 1 only, so engine "
                f"{self.name} scores at no other"
            )
        tokens = await self._checked(tokens, policy)
        if len(tokens) == 1:
            return Scored(np.zeros(1, np.float32), self._updates.version)
        with self._busy():
            return await self._whole(lambda: self._score(tokens, top_k))

    async def update(self, update: WeightUpdate) -> Version:
        await self._up()
        return await self._guarded(self._updates.update(update))

    async def audit(self) -> None:
        """Read back what the server computes with. Raises PolicyMismatch if it is not what was published."""
        await self._up()
        await self._guarded(self._updates.audit())

    async def abort(self, key: str) -> None:
        sent = list[str]()
        for name, place in list(self._by_key.get(key, {}).items()):
            if place.done():
                sent.append(PREFIX + name)
            else:
                place.set_result(False)
        if sent:
            await self._guarded(self._routes.abort(sent))

    async def sleep(self, weights: bool = False) -> None:
        raise ValueError(f"sleep: engine {self.name} is a vLLM server, which holds its memory until it is closed")

    async def wake(self) -> None:
        raise ValueError(f"wake: engine {self.name} is a vLLM server, which never sleeps")

    async def stats(self) -> EngineStats:
        if self._ready.done() and self._failure is None:
            with suppress(EngineFailed, TimeoutError, ValueError):
                await self._read_metrics()
        server, counts = self._server, self._counts
        begun = server["generation_tokens_total"] - self._before["generation_tokens_total"] - counts["scored"]
        return EngineStats(
            waiting=self._admission.waiting,
            running=self._admission.inside,
            version=self._updates.version,
            kv_used=min(1.0, server["kv_cache_usage_perc"]),
            generated=max(counts["generated_tokens"], int(begun)),
            preemptions=int(server["num_preemptions_total"] - self._before["num_preemptions_total"]),
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
        )

    def progress(self) -> float:
        """Tokens that the server has read and sampled, and completions."""
        return self._server["generation_tokens_total"] + self._server["prompt_tokens_total"] + self._counts["calls"]

    async def telemetry(self) -> Telemetry:
        spans = [*self._beside.take(), *self._idle.take()]
        counters: dict[str, float] = {**self._counts, "preemptions": self._server["num_preemptions_total"]}
        return Telemetry(self.name, os.getpid(), spans, counters, self._memory.update())

    async def close(self) -> None:
        """End the server, or what was asked of one that runs on: pending calls fail. Closing twice is fine."""
        self._fail(EngineFailed(f"engine {self.name} was closed"))
        for task in (self._ready, self._watching):
            task.cancel()
        sent = [PREFIX + name for names in self._by_key.values() for name, place in names.items() if place.done()]
        if self._process is None and sent:
            with suppress(EngineFailed, TimeoutError, ValueError):
                await self._routes.abort(sent)
        await self._client.close()
        if self._process is not None:
            await self._process.close()

    async def _start(self) -> None:
        """Wait for the server, and learn what it is."""
        if self._process is not None:
            await self._process.healthy(self._routes.health, self.settings.start_s)
        self._model, longest = await self._routes.model()
        self._context = min(self._context, longest - 1)  # `score` samples one token after a full row
        if self._transport is not None:
            await self._routes.open_transport(self._transport)
        self._updates.labels[await self._routes.label()] = self._updates.version
        warm = GenerateRequest(np.zeros(1, np.int32), SamplingParams(max_tokens=1))
        body = generate_body(warm, model=self._model, name=self._name(), salt=self._nonce, room=1, eos=())
        await self._client.post(GENERATE, body, self.settings.start_s)  # the first one takes long: it compiles
        self._before = await self._routes.metrics()
        self._server = Counter(self._before)

    async def _up(self) -> None:
        """Wait until the server is ready. Raises what its start raised, and EngineFailed once it has failed."""
        if self._failure is None and not self._ready.done():
            await asyncio.wait([self._ready])  # bounded: by engine.start_s
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
        self._ready.result()

    async def _checked(self, tokens: Array, policy: str, reply: int = 0) -> np.ndarray:
        await self._up()
        check_policy(policy, self._updates.version, self.name)
        tokens = checked_tokens(tokens, self._vocab)
        check_length(len(tokens), self._context, reply)
        return tokens

    async def _whole(self, attempt: Callable[[], Awaitable[T | None]]) -> T:
        """The result of `attempt`, which is made again where an update came between its prompt and its first token."""
        while (found := await self._guarded(attempt())) is None:
            self._counts["begun_again"] += 1
        return found

    async def _sample(self, request: GenerateRequest) -> Completion | None:
        """One try at a completion. None if its prompt was computed by older weights than all of its tokens."""
        arrived, name = time.monotonic(), self._name()
        place = self._by_key.setdefault(request.key, {})[name] = self._admission.request()
        try:
            if not await self._entered(place):
                return self._called_off(request)
            queued, oldest = time.monotonic() - arrived, self._updates.version
            key, salt = self._salt(request)
            body = generate_body(
                request, model=self._model, name=name, salt=salt, room=self._context - len(request.tokens), eos=self._eos
            )
            reply = await self._posted(body, name)
        finally:
            del self._by_key[request.key][name]
            if not self._by_key[request.key]:
                del self._by_key[request.key]
        done = completion_of(reply, request, self._updates.labels, oldest, self.name)
        if done.finish is not Finish.CANCELLED and done.sources[0] != oldest:
            return None
        if key is not None and not request.params.last:
            self._episodes.remember(request.key, key, np.concatenate([request.tokens, done.tokens]))
        self._counts.update(
            calls=1, generated_tokens=len(done.tokens), prompt_tokens=done.prompt_tokens, cached_tokens=done.cached_tokens
        )
        return replace(done, queued_s=queued, first_token_s=queued)

    async def _score(self, tokens: np.ndarray, top_k: int) -> Scored | None:
        """One try at the logprobs of a row. None if an update came while they were computed."""
        await self._entered(self._admission.request())
        version, name = self._updates.version, self._name()
        body = score_body(tokens, top_k, model=self._model, name=name, salt=self._salt_of(version))
        reply = await self._posted(body, name)
        self._counts.update(calls=1, scored=1)
        spans = spans_of(reply["choices"][0], 1, self._updates.labels, self.name)
        return scored_of(reply, tokens, top_k, version, self.name) if spans[0][0] == version else None

    async def _posted(self, body: dict[str, Any], name: str) -> Any:
        """The server's reply to a request that was let in. Its place is free again afterwards, however it ends."""
        try:
            return await self._client.post(GENERATE, body, ANSWER_S)
        except asyncio.CancelledError:
            await self._forget(name)
            raise
        finally:
            self._admission.leave()

    async def _entered(self, place: asyncio.Future[bool]) -> bool:
        """Wait for one's turn. False: it was called off."""
        try:
            return await place  # bounded: by the requests before it, and the caller's deadline
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None and place.result():
                self._admission.leave()
            raise

    def _called_off(self, request: GenerateRequest) -> Completion:
        nothing = np.zeros(0, np.int32)
        done = Completion(nothing, nothing.astype(np.float32), nothing, (self._updates.version,), Finish.CANCELLED)
        return replace(done, prompt_tokens=len(request.tokens), engine=self.name)

    def _salt(self, request: GenerateRequest) -> tuple[PolicyKey | None, str]:
        """(the version whose KV this request may find, if a later turn may find its own; the salt of that version)."""
        version = self._updates.version
        if self.settings.in_flight != InFlight.KEEP or not request.key:
            return None, self._salt_of(version)
        kept = self._episodes.salt(request.key, request.tokens)
        own = self._salt_of(version)
        return (version.key, own) if kept is None or kept not in self._salts else (kept, self._salts[kept])

    def _salt_of(self, version: Version) -> str:
        """Equal for equal weights alone: their fingerprint, or this engine's own word where that is not known."""
        return self._salts.setdefault(
            version.key, f"{version.step}.{version.incarnation}.{version.fingerprint or self._nonce}"
        )

    async def _forget(self, name: str) -> None:
        """Abort a request whose caller left."""
        with suppress(EngineFailed, TimeoutError, ValueError):
            await asyncio.shield(self._routes.abort([PREFIX + name]))  # bounded: by its deadline

    async def _guarded(self, work: Awaitable[T]) -> T:
        """The result of `work`. When the server has failed or ended, so has this engine, and the error says why."""
        try:
            return await work  # bounded: by the deadlines of its calls
        except EngineFailed as error:
            if self._failure is None:
                self._fail(EngineFailed(f"{error}{await self._last_words()}"))
            raise EngineFailed(str(self._failure)) from error

    async def _last_words(self) -> str:
        """The end of the server's process, if it has ended."""
        until = time.monotonic() + LAST_WORDS_S
        while self._process is not None and not self._process.ended and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self._process is None:
            return ""
        return f"; {self._process.ended or f'its log: {self._process.log}'}"

    def _fail(self, error: Exception) -> None:
        """Fail everything that is asked from now on, and end the server: nothing may be sampled from it any more."""
        if self._failure is None:
            self._failure = error
        self._admission.fail(EngineFailed(str(error)))
        if self._process is not None:
            self._process.kill()

    async def _watch(self) -> None:
        """Notice progress and the end of the server while nobody asks it for anything."""
        await asyncio.wait([self._ready])  # bounded: by engine.start_s
        while self._failure is None:
            await asyncio.sleep(WATCH_S)  # bounded: a watch, which `close` ends
            if self._process is not None and self._process.ended:
                self._fail(EngineFailed(self._process.ended))
            elif self._admission.inside:
                with suppress(EngineFailed, TimeoutError, ValueError):
                    await self._read_metrics()

    async def _read_metrics(self) -> None:
        self._server = await self._routes.metrics()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark that something is sampled or scored; such blocks may overlap."""
        self._calls += 1
        if self._calls == 1:
            self._span = self._beside.begin("generate")
        try:
            with self._idle.asked():
                yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._beside.end(self._span)

    def _name(self) -> str:
        return f"{self._nonce}-{next(self._numbers)}"
