"""Contract of engines: what is declared works, and what is not declared is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from contract_base import (
    FREE,
    PROMPT,
    TOLERANCE,
    VOCAB,
    ContractBase,
    Reference,
    log_softmax,
    refused,
)

from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.token_extras import MODEL_LOGPROBS, taken
from tidemill.core.types import Constraint, GenerateRequest


class CapabilityContract(ContractBase):
    async def test_truncation_reports_its_support(self, engine: Engine, able: Capabilities, models: list[Reference]) -> None:
        request = GenerateRequest(PROMPT, replace(FREE, top_p=0.8))
        if not able.support:
            await refused(engine.generate(request), "top_p")
            pytest.skip("support: not declared, and refused")
        done = await engine.generate(request)
        assert done.support is not None and len(done.support.offsets) == len(done.tokens) + 1
        for t, row in enumerate(models[0].rows(PROMPT, done.tokens)):
            ids = done.support.ids[done.support.offsets[t] : done.support.offsets[t + 1]]
            probabilities = np.exp(log_softmax(row))
            kept = probabilities[ids].sum()
            assert done.tokens[t] in ids and kept >= 0.8 - 1e-6 and kept - probabilities[ids].min() < 0.8 + 1e-6
            assert done.logprobs[t] == pytest.approx(float(np.log(probabilities[done.tokens[t]] / kept)), abs=TOLERANCE)

    async def test_alternatives_are_the_models_likeliest(
        self, engine: Engine, able: Capabilities, models: list[Reference]
    ) -> None:
        request = GenerateRequest(PROMPT, replace(FREE, temperature=0.7, top_logprobs=3))
        if MODEL_LOGPROBS not in able.extras:
            await refused(engine.generate(request), "top_logprobs")
            pytest.skip("model_logprobs: not declared, and refused")
        done = await engine.generate(request)
        rows = np.array([log_softmax(row) for row in models[0].rows(PROMPT, done.tokens)])
        best = np.argsort(-rows)[:, :3]
        assert done.top_ids is not None and done.top_ids.tolist() == best.tolist()
        np.testing.assert_allclose(done.top_logprobs, np.take_along_axis(rows, best, 1), atol=TOLERANCE)

    async def test_it_returns_the_token_extras_that_are_asked_for(self, engine: Engine, able: Capabilities) -> None:
        assert len({extra.name for extra in able.extras}) == len(able.extras)
        assert not (await engine.generate(GenerateRequest(PROMPT, FREE))).extras, "nobody asked"
        for asked in ((), *((extra,) for extra in able.extras), able.extras):
            done = await engine.generate(GenerateRequest(PROMPT, FREE, extras=tuple(extra.name for extra in asked)))
            assert taken(asked, done.extras, len(done.tokens), "it").keys() == done.extras.keys()
        await refused(engine.generate(GenerateRequest(PROMPT, FREE, extras=("horoscope",))), "horoscope")

    async def test_model_logprobs_are_the_unmodified_models(
        self, engine: Engine, able: Capabilities, models: list[Reference]
    ) -> None:
        if MODEL_LOGPROBS not in able.extras:
            await refused(engine.generate(GenerateRequest(PROMPT, FREE, extras=("model_logprobs",))), "model_logprobs")
            pytest.skip("model_logprobs: not declared, and refused")
        request = GenerateRequest(PROMPT, replace(FREE, temperature=0.6), extras=("model_logprobs",))
        done = await engine.generate(request)
        expected = models[0].logprobs(PROMPT, done.tokens)
        np.testing.assert_allclose(done.extras["model_logprobs"], expected, atol=TOLERANCE)

    async def test_a_constraint_is_refused_unless_declared(self, engine: Engine, able: Capabilities) -> None:
        if able.constraint:
            pytest.skip("constraint: declared, and no grammar is part of this contract")
        await refused(engine.generate(GenerateRequest(PROMPT, FREE, constraint=Constraint("regex", "[0-9]+"))), "constraint")

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_score_gives_what_generate_recorded(
        self, engine: Engine, able: Capabilities, models: list[Reference], temperature: float
    ) -> None:
        if not able.score:
            await refused(engine.score(PROMPT, "policy", temperature, 0), "score")
            pytest.skip("score: not declared, and refused")
        if not able.scores(temperature):
            await refused(engine.score(PROMPT, "policy", temperature, 0), "temperature", f"{able.scores_at:g}")
            pytest.skip(f"score: only at {able.scores_at:g}, and refused")
        done = await engine.generate(GenerateRequest(PROMPT, replace(FREE, temperature=temperature)))
        whole = np.concatenate([PROMPT, done.tokens])
        scored = await engine.score(whole, "policy", temperature, 0)
        assert scored.logprobs.shape == whole.shape and scored.logprobs.dtype == np.float32 and scored.logprobs[0] == 0
        np.testing.assert_allclose(scored.logprobs[len(PROMPT) :], done.logprobs, atol=TOLERANCE)
        expected = models[0].logprobs(whole[:1], whole[1:], temperature)
        np.testing.assert_allclose(scored.logprobs[1:], expected, atol=TOLERANCE)
        assert scored.version.step == 0
        last = np.array([VOCAB - 1, 5, VOCAB - 1, 0, VOCAB - 1], np.int32)  # servers may keep the last id for themselves
        scored = await engine.score(last, "policy", temperature, 0)
        expected = models[0].logprobs(last[:1], last[1:], temperature)
        np.testing.assert_allclose(scored.logprobs[1:], expected, atol=TOLERANCE)
        await refused(engine.score(whole, "policy", 0.0, 0), "temperature")

    async def test_it_sleeps_and_wakes_as_it_was(self, engine: Engine, able: Capabilities) -> None:
        if not able.sleep:
            await refused(engine.sleep(), "sleep")
            pytest.skip("sleep: not declared, and refused")
        before = await engine.generate(GenerateRequest(PROMPT, FREE))
        await engine.sleep()
        waiting = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, FREE)))
        await asyncio.sleep(0)
        await engine.wake()
        assert (await engine.generate(GenerateRequest(PROMPT, FREE))).tokens.tolist() == before.tokens.tolist()
        assert (await waiting).tokens.tolist() == before.tokens.tolist(), "a call that came while it slept was answered"
