"""Contract of engines: aborts, updates of the weights, statistics, and the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_base import (
    CONTEXT,
    FREE,
    LONG,
    PROMPT,
    TOLERANCE,
    ContractBase,
    Reference,
    expect_updates,
    in_parts,
    mislabelled,
    prompt,
    refused,
    steady,
    until,
)

from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.types import Finish, GenerateRequest, Version
from tidemill.core.weight_update import WeightUpdate


class LifecycleContract(ContractBase):
    async def test_abort_ends_every_request_of_its_key_and_no_other(self, engine: Engine, able: Capabilities) -> None:
        long = steady(able, LONG)
        whole = await engine.generate(GenerateRequest(PROMPT, long))
        before = (await engine.stats()).generated
        requests = [GenerateRequest(PROMPT, long, key=key) for key in ("g1/0", "g1/0", "g1/1")]
        calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]

        async def under_way() -> bool:
            return (await engine.stats()).generated > before + 3

        await until(under_way)
        await engine.abort("g1/0")
        await engine.abort("nobody's")
        *ended, other = await asyncio.gather(*calls)
        for done in ended:
            n = len(done.tokens)
            assert done.finish is Finish.CANCELLED and n < len(whole.tokens)
            assert done.tokens.tolist() == whole.tokens[:n].tolist() and len(done.logprobs) == len(done.versions) == n
        assert other.finish is Finish.CONTEXT and other.tokens.tolist() == whole.tokens.tolist()

    async def test_a_cancelled_call_leaves_the_engine(self, engine: Engine) -> None:
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))

        async def busy() -> bool:
            return (await engine.stats()).running > 0

        async def free() -> bool:
            stats = await engine.stats()
            return stats.running == stats.waiting == 0

        await until(busy)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(free)
        assert (await engine.stats()).generated < CONTEXT - len(PROMPT), "it was sampled to its end"

    async def test_tokens_after_an_update_are_the_new_versions(
        self, engine: Engine, able: Capabilities, models: list[Reference], published: WeightUpdate
    ) -> None:
        await expect_updates(engine, able, published)
        assert await engine.update(published) == published.version == (await engine.stats()).version
        done = await engine.generate(GenerateRequest(PROMPT, FREE))
        assert done.versions.tolist() == [1] * 20 and done.sources == (published.version,)
        np.testing.assert_allclose(done.logprobs, models[1].logprobs(PROMPT, done.tokens), atol=TOLERANCE)
        if able.score:
            scored = await engine.score(PROMPT, "policy", 1.0, 0)
            assert scored.version == published.version
            np.testing.assert_allclose(scored.logprobs[1:], models[1].logprobs(PROMPT[:1], PROMPT[1:]), atol=TOLERANCE)

    async def test_tokens_in_flight_are_stamped_with_the_weights_that_sampled_them(
        self, engine: Engine, able: Capabilities, models: list[Reference], published: WeightUpdate
    ) -> None:
        await expect_updates(engine, able, published)
        before = (await engine.stats()).generated
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))

        async def under_way() -> bool:
            return (await engine.stats()).generated > before + 3

        await until(under_way)
        await engine.update(published)
        done = await call
        steps = done.versions.tolist()
        assert steps == sorted(steps) and steps[0] == 0 and set(steps) == {v.step for v in done.sources}
        differs = np.flatnonzero(np.abs(done.logprobs - models[0].logprobs(PROMPT, done.tokens)) > TOLERANCE)
        boundary = int(differs[0]) if len(differs) else len(steps)  # where the new weights begin
        if able.token_versions:
            assert steps == [0] * boundary + [1] * (len(steps) - boundary)
        else:
            assert not any(steps), "an unknown boundary counts as the oldest version"

    async def test_a_wrong_fingerprint_is_refused_and_the_old_version_goes_on(
        self, engine: Engine, able: Capabilities, models: list[Reference], published: WeightUpdate, tmp_path: Path
    ) -> None:
        await expect_updates(engine, able, published)
        before = await engine.generate(GenerateRequest(PROMPT, steady(able, FREE)))
        false = published.version.fingerprint[::-1]
        relabelled = replace(published, version=replace(published.version, fingerprint=false))
        with mislabelled(models[1].folder, tmp_path, Version(1, fingerprint=false)) as sent:
            for wrong in (relabelled, sent):
                with pytest.raises(PolicyMismatch):
                    await engine.update(wrong)
        after = await engine.generate(GenerateRequest(PROMPT, steady(able, FREE)))
        assert after.tokens.tolist() == before.tokens.tolist() and after.sources == before.sources
        assert (await engine.stats()).version.step == 0
        assert await engine.update(published) == published.version, "the right one is accepted afterwards"

    @pytest.mark.parametrize("kind", ["delta", "adapter", "unknown"])
    async def test_an_update_of_a_kind_or_base_that_it_cannot_take_is_refused(
        self, engine: Engine, able: Capabilities, published: WeightUpdate, kind: Any
    ) -> None:
        await expect_updates(engine, able, published)
        update = replace(published, kind=kind, base=Version(0, fingerprint="another"))
        if kind in able.updates.kinds:
            with pytest.raises(PolicyMismatch, match=r"applies to policy@v0 \(fingerprint another\)"):
                await engine.update(update)
        else:
            await refused(engine.update(update), repr(kind), "full")
        assert (await engine.stats()).version.step == 0
        assert await engine.update(published) == published.version

    async def test_an_update_of_several_parts_is_their_whole_or_refused(
        self, engine: Engine, able: Capabilities, models: list[Reference], published: WeightUpdate, tmp_path: Path
    ) -> None:
        await expect_updates(engine, able, published)
        with in_parts(models[1].folder, tmp_path, step=1, parts=3) as update:
            if not able.updates.several_parts:
                await refused(engine.update(update), "1 part", "3")
                pytest.skip("several_parts: not declared, and refused")
            for lacking in (update.parts[:2], (*update.parts[:2], update.parts[0])):
                with pytest.raises(PolicyMismatch):
                    await engine.update(replace(update, parts=lacking))
            assert (await engine.stats()).version.step == 0
            assert await engine.update(update) == update.version
        done = await engine.generate(GenerateRequest(PROMPT, FREE))
        np.testing.assert_allclose(done.logprobs, models[1].logprobs(PROMPT, done.tokens), atol=TOLERANCE)

    async def test_stats_count_what_was_done(self, engine: Engine) -> None:
        start = await engine.stats()
        assert (start.waiting, start.running, start.generated, start.prompt_tokens) == (0, 0, 0, 0)
        assert start.version == Version(0)
        requests = [GenerateRequest(prompt(i % 2, 20), replace(FREE, seed=i, max_tokens=5 + i)) for i in range(4)]
        done = await asyncio.gather(*map(engine.generate, requests))
        stats = await engine.stats()
        assert stats.waiting == stats.running == 0 and 0 <= stats.kv_used <= 1
        assert stats.generated == sum(len(each.tokens) for each in done)
        assert stats.prompt_tokens == sum(each.prompt_tokens for each in done) == 80
        assert stats.cached_tokens == sum(each.cached_tokens for each in done)
        telemetry = await engine.telemetry()
        assert telemetry.pid > 0 and all(span.start <= span.end for span in telemetry.spans)

    async def test_close_ends_everything(self, engine: Engine) -> None:
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))

        async def busy() -> bool:
            return (await engine.stats()).running > 0

        await until(busy)
        await engine.close()
        with pytest.raises(EngineFailed):
            await call
        with pytest.raises(EngineFailed):
            await engine.generate(GenerateRequest(PROMPT, FREE))
        await engine.close()
