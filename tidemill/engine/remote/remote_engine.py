"""Base of engines behind a server: the calls under way, what they have sampled, statistics, abort and the end.

A server that fails takes its engine with it: whatever was asked raises EngineFailed, and the supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import EngineStats
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, Telemetry, Version
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.request_refusals import check_length, check_policy, checked_tokens
from tidemill.models.architecture import Architecture
from tidemill.models.tokenizer import generation_config, stop_ids
from tidemill.observability.process_memory import PeakMemory
from tidemill.observability.timeline import Beside, Idle

T = TypeVar("T")
ANSWER_S = 3600.0  # for a completion; the caller has a deadline of its own
SHORT_S = 60.0  # for a call that samples little or nothing


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One request under way, and what came of it so far."""

    request: GenerateRequest
    name: str = ""  # by which the server knows it
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False
    limit: asyncio.Timeout | None = None  # expires when it is aborted
    arrived: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    place: asyncio.Future[bool] | None = None  # in the queue of those to be sent, for engines that admit them

    def completion(self, finish: Finish, oldest: Version, engine: str) -> Completion:
        logprobs = np.array(self.logprobs, np.float32)
        return Completion(
            tokens=np.array(self.tokens, np.int32),
            logprobs=logprobs if self.request.params.temperature > 0 else np.zeros_like(logprobs),  # it is certain
            versions=np.array([version.step for version in self.versions], np.int32),
            sources=tuple(dict.fromkeys(self.versions)) or (oldest,),
            finish=finish,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=min(self.cached, len(self.request.tokens)),
            first_token_s=self.first_token_s,
            engine=engine,
        )


class RemoteEngine:
    """`interfaces.Engine` without its own `capabilities`, `generate`, `score` and `update`."""

    def __init__(self, client: ServerClient, spec: EngineSpec) -> None:
        """Begin in a running event loop; `_start`, which a subclass has, runs at once."""
        arch = Architecture.from_folder(spec.model)
        self.name, self._client, self._first = spec.name, client, spec.version
        self._vocab, self._context = arch.vocab, spec.engine.context_of(arch.context)
        self._ends = stop_ids(None, arch, generation_config(spec.model))
        self._calls = set[RemoteCall]()
        self._counts = Counter[str]()
        self._beside, self._idle, self._memory = Beside(), Idle(), PeakMemory()
        self._at_work, self._span = 0, 0  # samples and scores under way, the span of their time
        self._failure: Exception | None = None
        self._ready = asyncio.get_running_loop().create_task(self._start(), name=f"start of {spec.name}")

    async def _start(self) -> None:
        """Ask the server what it is. Everything here has a deadline."""
        raise NotImplementedError

    @property
    def _version(self) -> Version:
        """The version that is served."""
        return self._first

    async def abort(self, key: str) -> None:
        for call in [call for call in self._calls if call.request.key == key]:
            call.aborted = True
            if call.limit is not None and not call.limit.expired():
                call.limit.reschedule(asyncio.get_running_loop().time())

    async def sleep(self, weights: bool = False) -> None:
        raise ValueError(f"sleep: engine {self.name} is a server, which holds its memory; set placement.share = 'beside'")

    async def wake(self) -> None:
        raise ValueError(f"wake: engine {self.name} is a server, which never sleeps")

    async def stats(self) -> EngineStats:
        counts = self._counts
        sampled = counts["generated_tokens"] + sum(len(call.tokens) for call in self._calls)
        running = len(self._calls)
        return EngineStats(0, running, self._version, 0.0, sampled, 0, counts["prompt_tokens"], counts["cached_tokens"])

    def progress(self) -> float:
        """The work done so far. While the server starts, which has a limit of its own, the time passes for it."""
        return self._work() if self._ready.done() else time.monotonic()

    def _work(self) -> float:
        """Calls and tokens so far."""
        return sum(self._counts.values()) + sum(len(call.tokens) for call in self._calls)

    async def telemetry(self) -> Telemetry:
        spans = [*self._beside.take(), *self._idle.take()]
        return Telemetry(self.name, os.getpid(), spans, dict[str, float](self._counts), self._memory.update())

    async def close(self) -> None:
        """End what was asked: pending calls fail. Closing twice is fine."""
        self._failure = self._failure or EngineFailed(f"engine {self.name} was closed")
        self._ready.cancel()
        await self._client.close()

    async def _up(self) -> None:
        """Wait until the server has said what it can do."""
        if self._failure is None:
            await asyncio.wait({self._ready})  # bounded: by the deadlines of `_start`
        self._check_alive()
        self._ready.result()

    async def _checked(self, tokens: Array, policy: str, reply: int) -> np.ndarray:
        await self._up()
        check_policy(policy, (self._version.policy,), self.name)
        tokens = checked_tokens(tokens, self._vocab)
        check_length(len(tokens), self._context, reply)
        return tokens

    @contextmanager
    def _under_way(self, call: RemoteCall) -> Iterator[None]:
        """Count a call, and take it out at its end, however that comes."""
        self._calls.add(call)
        try:
            with self._busy():
                yield
        finally:
            self._calls.discard(call)
            self._counts["calls"] += 1
            self._counts["prompt_tokens"] += len(call.request.tokens)
            self._counts["cached_tokens"] += call.cached
            self._counts["generated_tokens"] += len(call.tokens)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark that something is sampled or scored; such blocks may overlap."""
        self._at_work += 1
        if self._at_work == 1:
            self._span = self._beside.begin("generate")
        try:
            with self._idle.asked():
                yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._beside.end(self._span)

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`. If the server failed, so has this engine."""
        self._check_alive()
        try:
            found = await work()
        except EngineFailed as error:
            await self._failed(error)
            raise EngineFailed(str(self._failure)) from error
        self._check_alive()  # it may have been closed meanwhile
        return found

    async def _failed(self, error: EngineFailed) -> None:
        """The server failed: so has this engine from now on."""
        self._failure = self._failure or error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
