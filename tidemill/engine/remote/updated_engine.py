"""Base of engines behind a server that takes new weights: admission, salts, the server's process, and its end.

    generate -> admission -> the server's route -> spans of weight versions -> Completion

The server starts when the engine is made, and every call waits until it is ready. When the server fails or ends, so does
the engine: whatever was asked raises EngineFailed, and the supervisor starts both anew.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import EngineStats
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, InFlight, SamplingParams, Scored, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.kept_conversations import KeptConversations
from tidemill.engine.remote.admission import Admission
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.remote_engine import RemoteCall, RemoteEngine
from tidemill.engine.remote.server_process import ServerProcess
from tidemill.engine.remote.server_settings import ServerSettings
from tidemill.engine.remote.server_updates import ServerUpdater, Updated
from tidemill.engine.request_refusals import check_request, check_temperature

T = TypeVar("T")
WATCH_S = 1.0  # between two looks at the server while it works
LAST_WORDS_S = 1.0  # for the end of a server's process to be noticed after its connections broke


class UpdatedEngine(RemoteEngine):
    """One server, and what this engine asked of it."""

    server = "the server"  # as errors call its kind

    def __init__(
        self,
        client: ServerClient,
        spec: EngineSpec,
        takes: UpdateSupport,
        process: ServerProcess | None,
        updater: Callable[[Updated], ServerUpdater],
    ) -> None:
        """Begin to start, in a running event loop. process: the server, if it is this engine's own."""
        assert isinstance(spec.engine, ServerSettings)
        super().__init__(client, spec)
        self._admission, self._episodes = Admission(spec.engine.max_sequences), KeptConversations()
        self._in_flight, self._process = InFlight(spec.engine.in_flight), process
        self._updates = updater(
            Updated(spec.name, spec.version, takes, self._admission, self._in_flight, self._beside.span, self._fail)
        )
        self._salts = dict[PolicyKey, str]()
        self._nonce, self._numbers = secrets.token_hex(8), itertools.count()
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._watch(), name=f"watch of {spec.name}")

    @abstractmethod
    def _check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters whose distribution the server cannot sample or report."""

    @abstractmethod
    async def _ask(self, call: RemoteCall, salt: str, oldest: Version) -> Completion:
        """Have the server sample a completion. oldest: the version that is served now."""

    @abstractmethod
    async def _ask_score(self, tokens: np.ndarray, top_k: int, name: str, salt: str, version: Version) -> Scored | None:
        """Have the server score a row by `version`. None if an update came while it did."""

    @abstractmethod
    async def _abort(self, names: list[str]) -> None:
        """Have the server end requests."""

    async def _look(self) -> None:
        """Read how far the server is; called now and then while it works."""

    @property
    def _version(self) -> Version:
        return self._updates.version

    async def generate(self, request: GenerateRequest) -> Completion:
        check_request(request, self.name, ())
        self._check_params(request.params)
        call = RemoteCall(replace(request, tokens=await self._checked(request.tokens, request.policy, reply=1)))
        with self._under_way(call):
            return await self._whole(lambda: self._sample(call))

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        check_temperature(temperature)
        if temperature != 1:
            raise ValueError(
                f"temperature={temperature:g}: {self.server} gives the logprobs of given tokens at temperature 1 only, so "
                f"engine {self.name} scores at no other"
            )
        tokens = await self._checked(tokens, policy, reply=0)
        if len(tokens) == 1:
            return Scored(np.zeros(1, np.float32), self._version)
        with self._busy():
            return await self._whole(lambda: self._score(tokens, top_k))

    async def update(self, update: WeightUpdate) -> Version:
        await self._up()
        return await self._guarded(lambda: self._updates.update(update))

    async def abort(self, key: str) -> None:
        sent = list[str]()
        for call in [call for call in self._calls if call.request.key == key and call.place is not None]:
            assert call.place is not None
            call.aborted = True
            if call.place.done():
                sent.append(call.name)
            else:
                call.place.set_result(False)
        if sent:
            await self._guarded(lambda: self._abort(sent))

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), waiting=self._admission.waiting, running=self._admission.inside)

    async def close(self) -> None:
        """End the server, or what was asked of one that runs on: pending calls fail. Closing twice is fine."""
        self._fail(EngineFailed(f"engine {self.name} was closed"))
        self._watching.cancel()
        sent = [call.name for call in self._calls if call.place is not None and call.place.done()]
        if self._process is None and sent:
            with suppress(EngineFailed, TimeoutError, ValueError):
                await self._abort(sent)
        await super().close()
        if self._process is not None:
            await self._process.close()

    async def _whole(self, attempt: Callable[[], Awaitable[T | None]]) -> T:
        """The result of `attempt`, which is made again where an update came between its prompt and its first token."""
        while (found := await self._guarded(attempt)) is None:
            self._counts["begun_again"] += 1
        return found

    async def _sample(self, call: RemoteCall) -> Completion | None:
        """One try at a completion. None if its prompt was computed by older weights than all of its tokens."""
        request, call.name = call.request, self._name()
        call.place = self._admission.request()
        if not await self._entered(call.place):
            return replace(call.completion(Finish.CANCELLED, self._version, self.name), queued_s=0.0)
        queued, oldest = time.monotonic() - call.arrived, self._version
        key, salt = self._salt(request)
        done = await self._within(call.name, self._ask(call, salt, oldest))
        if done.finish is not Finish.CANCELLED and done.sources[0] != oldest:
            return None
        if key is not None and not request.params.last:
            self._episodes.remember(request.key, key, np.concatenate([request.tokens, done.tokens]))
        call.tokens, call.cached = done.tokens.tolist(), done.cached_tokens
        return replace(done, queued_s=queued, first_token_s=max(queued, done.first_token_s))

    async def _score(self, tokens: np.ndarray, top_k: int) -> Scored | None:
        """One try at the logprobs of a row. None if an update came while they were computed."""
        await self._entered(self._admission.request())
        version, name = self._version, self._name()
        found = await self._within(name, self._ask_score(tokens, top_k, name, self._salt_of(version), version))
        self._counts.update(calls=1, scored=1)
        return found

    async def _within(self, name: str, asked: Awaitable[T]) -> T:
        """The server's answer to a request that was let in. Its place is free again afterwards, however it ends."""
        try:
            return await asked  # bounded: by the deadline of its call
        except asyncio.CancelledError:
            with suppress(EngineFailed, TimeoutError, ValueError):
                await asyncio.shield(self._abort([name]))  # bounded: by its deadline
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

    def _salt(self, request: GenerateRequest) -> tuple[PolicyKey | None, str]:
        """(the version whose KV this request may find, if a later turn may find its own; the salt of that version)."""
        version = self._version
        if self._in_flight != InFlight.KEEP or not request.key:
            return None, self._salt_of(version)
        kept = self._episodes.salt(request.key, request.policy, request.tokens)
        own = self._salt_of(version)
        return (version.key, own) if kept is None or kept not in self._salts else (kept, self._salts[kept])

    def _salt_of(self, version: Version) -> str:
        """Equal for equal weights alone: their fingerprint, or this engine's own word where that is not known."""
        return self._salts.setdefault(
            version.key, f"{version.step}.{version.incarnation}.{version.fingerprint or self._nonce}"
        )

    async def _failed(self, error: EngineFailed) -> None:
        if self._failure is None:
            self._fail(EngineFailed(f"{error}{await self._last_words()}"))

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
                    await self._look()

    def _name(self) -> str:
        """A new name for a request. None begins with another one, by which a server may end it."""
        return f"{self._nonce}-{next(self._numbers)}-"
