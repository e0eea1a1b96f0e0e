"""An engine that is any server with OpenAI's `/v1/completions` and token ids: it samples and scores.

The server's weights are its own: nothing is published to it, and it proves nothing, so no run trains on its tokens. What it
can do is found out at the start (`server_probe`).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from tidemill.core.errors import EngineFailed
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, SamplingParams, Scored, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.openai.openai_settings import OpenaiSettings
from tidemill.engine.openai.server_probe import ROUTE, ServerAbilities, probe, read_choice, score
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.remote.remote_engine import ANSWER_S, RemoteCall, RemoteEngine
from tidemill.engine.remote.server_key import key_of
from tidemill.engine.request_refusals import check_request, check_temperature, refuse_asked
from tidemill.models.weight_slices import Receiver
from tidemill.runtime.cpu_sharing import Cores


def build(spec: EngineSpec, receiver: Receiver | None, cores: Cores) -> OpenaiEngine:
    """Connect to the server of the settings."""
    settings = spec.engine
    assert isinstance(settings, OpenaiSettings)
    if receiver is not None:
        receiver.close()
    url = settings.url.rstrip("/").removesuffix("/v1")
    return OpenaiEngine(ServerClient(url, name=f"the server at {url}", key=key_of(settings.key_variable)), spec)


class OpenaiEngine(RemoteEngine):
    """One server, and what this engine asked of it."""

    def __init__(self, client: ServerClient, spec: EngineSpec) -> None:
        assert isinstance(spec.engine, OpenaiSettings)
        self._asked_model, self._takes = spec.engine.served_model, UpdateSupport(())
        self._probed: ServerAbilities | None = None
        super().__init__(client, spec)

    async def _start(self) -> None:
        self._probed = await probe(self._client, self._asked_model, self._vocab)
        self._context = min(self._context, self._probed.context or self._context)

    @property
    def _can(self) -> ServerAbilities:
        assert self._probed is not None
        return self._probed

    async def capabilities(self) -> Capabilities:
        await self._up()
        return Capabilities(
            self._context,
            support=False,
            seeds=self._can.seeds,
            score=self._can.scores,
            scores_at=1.0,
            samples_at=None if self._can.tempered else 1.0,
            proof="none",
            updates=self._takes,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        check_request(request, self.name, ())
        tokens = await self._checked(request.tokens, request.policy, reply=1)
        self._check_params(request.params)
        call = RemoteCall(replace(request, tokens=tokens))
        with self._under_way(call):
            finish = await self._guarded(lambda: self._sample(call))
        return call.completion(finish, self._version, self.name)

    async def score(self, tokens: Array, policy: str, temperature: float = 1.0, top_k: int = 0) -> Scored:
        check_temperature(temperature)
        tokens = await self._checked(tokens, policy, reply=0)
        refuse_asked(self.name, {"score": not self._can.scores}, "is a server that gives no logprobs of a prompt")
        refuse_asked(self.name, {"top_k": top_k > 0}, "does not name the alternatives of scored tokens")
        if temperature != 1:
            raise ValueError(f"temperature={temperature:g}: engine {self.name} gives the logprobs of a prompt at 1 only")
        if len(tokens) == self._context:
            raise ValueError(f"score: {len(tokens)} tokens fill the context of engine {self.name}; shorten the row by one")
        if len(tokens) == 1:
            return Scored(np.zeros(1, np.float32), self._version)
        with self._busy():
            found = await self._guarded(lambda: score(self._client, self._can.model, tokens.tolist(), ANSWER_S))
        if found is None:
            raise EngineFailed(f"engine {self.name} returned no logprobs of a prompt, as it did at its start")
        return Scored(np.array(found, np.float32), self._version)

    async def update(self, update: WeightUpdate) -> Version:
        self._takes.check(update, f"engine {self.name}", self._version)
        raise AssertionError("it takes none")

    def _check_params(self, p: SamplingParams) -> None:
        truncated = {"top_p": p.top_p < 1, "top_k": p.top_k > 0, "min_p": p.min_p > 0}
        if p.temperature > 0:
            refuse_asked(self.name, truncated, "does not say which tokens each one was chosen from")
        refuse_asked(self.name, {"top_logprobs": p.top_logprobs > 0, "min_tokens, penalties and logit_bias": p.adjusted})
        refuse_asked(self.name, {"ignore_eos": p.ignore_eos and not self._can.ignores_eos})
        if p.temperature not in (0, 1) and not self._can.tempered:
            raise ValueError(
                f"temperature={p.temperature:g}: engine {self.name} returns logprobs at temperature 1, whatever is asked, "
                "so they would not be those that it sampled by; set 1, or 0 for the likeliest tokens"
            )

    async def _sample(self, call: RemoteCall) -> Finish:
        """Read the stream of a reply until it ends, a stop id comes, or it is aborted."""
        params, can = call.request.params, self._can
        most = min(params.max_tokens, self._context - len(call.request.tokens))
        ends = {*params.stop_ids} | (set[int]() if params.ignore_eos else {*self._ends})
        body: dict[str, Any] = {"model": can.model, "prompt": call.request.tokens.tolist(), "max_tokens": most}
        body |= {"temperature": params.temperature, "seed": params.seed & (2**63 - 1), "logprobs": 1, "stream": True}
        body |= {"return_token_ids": True}
        body |= {"stop_token_ids": [*params.stop_ids]} if can.stops and params.stop_ids else {}
        body |= {"ignore_eos": True} if params.ignore_eos else {}
        try:
            events = self._client.events(ROUTE, body, ANSWER_S)
            async with asyncio.Timeout(None) as call.limit, aclosing(events):  # the first expires when it is aborted
                async for event in events:
                    self._add(call, event)
                    if ended := next((t for t, token in enumerate(call.tokens, 1) if token in ends), 0):
                        del call.tokens[ended:], call.logprobs[ended:], call.versions[ended:]
                        return Finish.STOP
        except TimeoutError:
            if not call.aborted:
                raise
            return Finish.CANCELLED
        if not call.tokens:
            raise EngineFailed(f"engine {self.name} returned no tokens")
        if len(call.tokens) < most:  # it knows other ends than the model's folder names
            return Finish.STOP
        return Finish.LENGTH if most == params.max_tokens else Finish.CONTEXT

    def _add(self, call: RemoteCall, event: Any) -> None:
        if not (isinstance(event, dict) and event.get("choices")):  # of the usage
            return
        if not (event["choices"][0].get("token_ids")):
            return
        try:
            ids, logprobs = read_choice(event, self._client.name)
        except ValueError as error:
            raise EngineFailed(str(error)) from error
        call.tokens += ids
        call.logprobs += logprobs
        call.versions += [self._version] * len(ids)
        call.first_token_s = call.first_token_s or time.monotonic() - call.arrived
