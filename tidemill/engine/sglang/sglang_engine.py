"""An engine that is an SGLang server: `interfaces.Engine` over its routes for tokens, pauses and updates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import Capabilities, EngineStats
from tidemill.core.types import Completion, SamplingParams, Scored, Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.remote_engine import ANSWER_S, RemoteCall
from tidemill.engine.remote.server_process import ServerProcess
from tidemill.engine.remote.updated_engine import UpdatedEngine
from tidemill.engine.remote.version_spans import spans_of
from tidemill.engine.request_refusals import check_exact
from tidemill.engine.sglang.group_hand_over import GroupHandOver
from tidemill.engine.sglang.hand_over import HandOver
from tidemill.engine.sglang.sglang_routes import SglangRoutes
from tidemill.engine.sglang.sglang_settings import SglangSettings
from tidemill.engine.sglang.sglang_updates import SglangUpdater
from tidemill.engine.sglang.sglang_wire import (
    GENERATE,
    add_event,
    end_of,
    finish_of,
    generate_body,
    score_body,
    scored_of,
)
from tidemill.models.adapted_base import AdaptedBase
from tidemill.models.weight_slices import Receiver


class SglangEngine(UpdatedEngine):
    """One server, and what this engine asked of it."""

    server = "SGLang"
    _updates: SglangUpdater

    def __init__(
        self,
        client: ServerClient,
        spec: EngineSpec,
        process: ServerProcess | None,
        receiver: Receiver | None,
        takes: UpdateSupport,
        routes: SglangRoutes,
        hand_over: HandOver,
        base: AdaptedBase | None = None,
    ) -> None:
        """See `UpdatedEngine`. receiver: source of updates. hand_over: gives them to the server. base: of adapters."""
        assert isinstance(spec.engine, SglangSettings)
        self._routes, self._hand_over, self._start_s = routes, hand_over, spec.engine.start_s
        self._load: dict[str, Any] = {}
        updater = partial(SglangUpdater, routes=routes, receiver=receiver, hand_over=hand_over, base=base)
        super().__init__(client, spec, takes, process, updater)

    async def capabilities(self) -> Capabilities:
        await self._up()
        return Capabilities(
            self._context, support=False, seeds=False, scores_at=1.0, proof="received", updates=self._updates.takes
        )

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), kv_used=min(1.0, self._load.get("token_usage", 0.0)))

    def _work(self) -> float:
        """Tokens that the server has read and sampled, and calls."""
        return super()._work() + self._load.get("total_prefill_uncached_tokens", 0)

    async def close(self) -> None:
        await super().close()
        await self._updates.close()

    async def _start(self) -> None:
        """Wait for the server, and learn what it is."""
        if self._process is not None:
            await self._process.healthy(self._routes.health, self._start_s)
        info = await self._routes.info()
        self._context = min(self._context, info["max_req_input_len"] - 1)
        if isinstance(self._hand_over, GroupHandOver):
            self._hand_over.ranks = info["tp_size"]
        if self._updates.takes.kinds and self._process is None:
            await self._routes.clear()
        self._updates.labels[await self._routes.label()] = self._version
        await self._client.post(GENERATE, self._warm(), self._start_s)  # the first one takes long

    def _warm(self) -> dict[str, Any]:
        """A request whose tokens nobody needs."""
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        return {"rid": self._name(), "input_ids": [0], "sampling_params": sampling, "extra_key": self._nonce}

    def _check_params(self, params: SamplingParams) -> None:
        check_exact(params, self.name)

    async def _ask(self, call: RemoteCall, salt: str, oldest: Version) -> Completion:
        params, prompt = call.request.params, len(call.request.tokens)
        ends = params.stop_ids if params.ignore_eos else (*params.stop_ids, *self._ends)
        most = min(params.max_tokens, self._context - prompt)
        call.tokens, call.logprobs, call.versions, call.cached = [], [], [], 0  # those of a try before
        body = generate_body(call.request, name=call.name, salt=salt, most=most, ends=ends)
        last, ended = dict[str, Any](), 0
        async with aclosing(self._client.events(GENERATE, body, ANSWER_S)) as events:
            async for event in events:
                last = add_event(call, event, self.name)
                call.first_token_s = call.first_token_s or time.monotonic() - call.arrived
                ended = ended or end_of(call, ends)
                if not last["finish_reason"] and (ended or call.aborted):  # once more, if that came before the request
                    await self._abort([call.name])
        if not last.get("finish_reason"):
            raise EngineFailed(f"{self._client.name} ended a reply in its middle")
        finish, refused = finish_of(call, last, ended, self._updates.labels, self.name)
        if refused:
            raise _refusal(last, f"{self._client.name} answered {GENERATE}: {refused}")
        return call.completion(finish, oldest, self.name)

    async def _ask_score(self, tokens: np.ndarray, top_k: int, name: str, salt: str, version: Version) -> Scored | None:
        reply = await self._client.post(GENERATE, score_body(tokens, top_k, name=name, salt=salt), ANSWER_S)
        try:
            meta = reply["meta_info"]
        except (KeyError, TypeError):
            raise EngineFailed(f"{self._client.name} answered {GENERATE} with no reply: {str(reply)[:200]}") from None
        spans = spans_of(meta.get("weight_versions"), meta["completion_tokens"], self._updates.labels, self.name)
        if not spans:
            raise EngineFailed(f"{self._client.name} aborted a score: {meta.get('finish_reason')}")
        return scored_of(meta, tokens, top_k, version, self._vocab, self.name) if spans[0][0] == version else None

    async def _abort(self, names: list[str]) -> None:
        await self._routes.abort(names)

    async def _look(self) -> None:
        self._load = await self._routes.load()


def _refusal(meta: Mapping[str, Any], why: str) -> Exception:
    """The error of a request that the server ended: a refusal is the caller's fault, anything else the server's."""
    return ValueError(why) if meta["finish_reason"]["status_code"] < 500 else EngineFailed(why)
