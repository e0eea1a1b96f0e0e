"""An engine that is a vLLM server: `interfaces.Engine` over its routes for tokens, pauses and updates."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Scored, Telemetry, Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.remote_engine import ANSWER_S, RemoteCall
from tidemill.engine.remote.server_process import ServerProcess
from tidemill.engine.remote.updated_engine import UpdatedEngine
from tidemill.engine.remote.version_spans import spans_of
from tidemill.engine.vllm.server_routes import ServerRoutes
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.engine.vllm.vllm_updates import VllmUpdater
from tidemill.engine.vllm.wire import (
    GENERATE,
    PREFIX,
    check_params,
    choice_of,
    completion_of,
    generate_body,
    score_body,
    scored_of,
)


class VllmEngine(UpdatedEngine):
    """One server, and what this engine asked of it."""

    server = "vLLM"
    _updates: VllmUpdater

    def __init__(
        self, client: ServerClient, spec: EngineSpec, takes: UpdateSupport, process: ServerProcess | None = None
    ) -> None:
        """See `UpdatedEngine`."""
        assert isinstance(spec.engine, VllmSettings)
        self.settings, self._transport, self._model = spec.engine, spec.transport, ""
        self._base_dtype = spec.base_dtype if spec.adapter_rank else ""
        self._routes = ServerRoutes(client)
        self._server, self._before = Counter[str](), Counter[str]()
        updater = partial(VllmUpdater, routes=self._routes, audit_every=spec.engine.audit_every)
        super().__init__(client, spec, takes, process, updater)

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

    async def audit(self) -> None:
        """Read back what the server computes with. Raises PolicyMismatch if it is not what was published."""
        await self._up()
        await self._guarded(self._updates.audit)

    async def stats(self) -> EngineStats:
        if self._ready.done() and self._failure is None:
            with suppress(EngineFailed, TimeoutError, ValueError):
                await self._look()
        server, before, stats = self._server, self._before, await super().stats()
        begun = server["generation_tokens_total"] - before["generation_tokens_total"] - self._counts["scored"]
        return replace(
            stats,
            kv_used=min(1.0, server["kv_cache_usage_perc"]),
            generated=max(stats.generated, int(begun)),
            preemptions=int(server["num_preemptions_total"] - before["num_preemptions_total"]),
        )

    def _work(self) -> float:
        """Tokens that the server has read and sampled, and completions."""
        return self._server["generation_tokens_total"] + self._server["prompt_tokens_total"] + self._counts["calls"]

    async def telemetry(self) -> Telemetry:
        told = await super().telemetry()
        return replace(told, counters={**told.counters, "preemptions": self._server["num_preemptions_total"]})

    async def _start(self) -> None:
        """Wait for the server, and learn what it is."""
        if self._process is not None:
            await self._process.healthy(self._routes.health, self.settings.start_s)
        self._model, longest = await self._routes.model()
        self._context = min(self._context, longest - 1)  # `score` samples one token after a full row
        if self._transport is not None:
            await self._routes.open_transport(self._transport, self._base_dtype)
        self._updates.labels[await self._routes.label()] = self._version
        warm = GenerateRequest(np.zeros(1, np.int32), SamplingParams(max_tokens=1))
        body = generate_body(warm, model=self._model, name=self._name(), salt=self._nonce, room=1, eos=())
        await self._client.post(GENERATE, body, self.settings.start_s)  # the first one takes long: it compiles
        self._before = await self._routes.metrics()
        self._server = Counter(self._before)

    def _check_params(self, params: SamplingParams) -> None:
        check_params(params, self.name)

    async def _ask(self, call: RemoteCall, salt: str, oldest: Version) -> Completion:
        request = call.request
        room, ends = self._context - len(request.tokens), self._ends
        body = generate_body(request, model=self._model, name=call.name, salt=salt, room=room, eos=ends)
        return completion_of(await self._posted(body), request, self._updates.labels, oldest, self.name)

    async def _ask_score(self, tokens: np.ndarray, top_k: int, name: str, salt: str, version: Version) -> Scored | None:
        reply = await self._posted(score_body(tokens, top_k, model=self._model, name=name, salt=salt))
        spans = spans_of(choice_of(reply, self.name).get("weight_versions"), 1, self._updates.labels, self.name)
        return scored_of(reply, tokens, top_k, version, self.name) if spans[0][0] == version else None

    async def _posted(self, body: dict[str, Any]) -> Any:
        return await self._client.post(GENERATE, body, ANSWER_S)

    async def _abort(self, names: list[str]) -> None:
        await self._routes.abort([PREFIX + name for name in names])

    async def _look(self) -> None:
        self._server = await self._routes.metrics()
