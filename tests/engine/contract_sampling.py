"""Contract of engines: the shape of a completion, where it ends, and the distribution it was sampled from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from contract_base import (
    CONTEXT,
    EOS,
    FREE,
    LONG,
    PROMPT,
    TOLERANCE,
    VOCAB,
    ContractBase,
    Reference,
    log_softmax,
    prompt,
    refused,
    steady,
    warm,
)

from tidemill.core.interfaces import Capabilities, Engine
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Completion, Finish, GenerateRequest


class SamplingContract(ContractBase):
    async def test_it_is_an_engine_and_its_context_is_the_models(self, engine: Engine, able: Capabilities) -> None:
        assert isinstance(engine, Engine)
        assert 0 < able.context <= CONTEXT

    async def test_a_completion_has_an_entry_a_token_and_travels(self, engine: Engine) -> None:
        asked = PROMPT.copy()
        done = await engine.generate(GenerateRequest(asked, FREE, key="g0/0"))
        assert asked.tolist() == PROMPT.tolist(), "the caller's prompt was changed"
        kinds = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
        for name, dtype in kinds.items():
            column = getattr(done, name)
            assert column.shape == (20,) and column.dtype == dtype, name
        assert ((done.tokens >= 0) & (done.tokens < VOCAB)).all() and (done.logprobs <= 0).all()
        assert done.finish is Finish.LENGTH and done.prompt_tokens == len(PROMPT)
        assert 0 <= done.cached_tokens <= done.prompt_tokens and 0 <= done.queued_s <= done.first_token_s
        assert done.support is None and done.top_ids is None and done.top_logprobs is None
        assert [v.step for v in done.sources] == [0] and not done.versions.any()
        back = decode(encode(done), Completion)
        assert back.tokens.tolist() == done.tokens.tolist() and back.sources == done.sources

    async def test_it_ends_where_it_should(self, engine: Engine, able: Capabilities) -> None:
        long = steady(able, LONG)
        whole = await engine.generate(GenerateRequest(PROMPT, long))
        assert whole.finish is Finish.CONTEXT and len(whole.tokens) == able.context - len(PROMPT)
        stop = int(whole.tokens[7])
        first = whole.tokens.tolist().index(stop)
        for most, finish in ((CONTEXT, Finish.STOP), (first + 1, Finish.STOP), (first, Finish.LENGTH)):
            if most == 0:
                continue
            done = await engine.generate(GenerateRequest(PROMPT, replace(long, max_tokens=most, stop_ids=(stop,))))
            assert (done.finish, done.tokens.tolist()) == (finish, whole.tokens[: min(most, first + 1)].tolist())
        last = await engine.generate(GenerateRequest(prompt(3, able.context - 1), LONG))
        assert len(last.tokens) == 1 and last.finish is Finish.CONTEXT

    async def test_it_ends_at_the_models_eos_unless_told_to_ignore_it(self, engine: Engine, able: Capabilities) -> None:
        for seed in range(100):
            whole = await engine.generate(GenerateRequest(PROMPT, replace(FREE, seed=seed)))
            if EOS in whole.tokens[:-1]:
                break
        else:
            raise AssertionError("EOS was never sampled")
        if not able.seeds:  # the reply is sampled once more until it ends before its last token
            for _ in range(100):
                done = await engine.generate(GenerateRequest(PROMPT, replace(FREE, ignore_eos=False)))
                if done.finish is Finish.STOP:
                    break
            assert EOS not in done.tokens[:-1] and done.tokens[-1] == EOS
            return
        done = await engine.generate(GenerateRequest(PROMPT, replace(FREE, seed=seed, ignore_eos=False)))
        end = whole.tokens.tolist().index(EOS) + 1
        assert done.finish is Finish.STOP and done.tokens.tolist() == whole.tokens[:end].tolist()

    async def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(self, engine: Engine, able: Capabilities) -> None:
        for tokens in (prompt(0, able.context), prompt(0, 0), np.array([VOCAB], np.int32), np.array([-1], np.int32)):
            await refused(engine.generate(GenerateRequest(tokens, FREE)))
        await refused(engine.generate(GenerateRequest(PROMPT, FREE, policy="teacher")), "teacher")
        assert len((await engine.generate(GenerateRequest(PROMPT, FREE))).tokens) == 20

    async def test_greedy_is_the_likeliest_token(self, engine: Engine, models: list[Reference]) -> None:
        greedy = replace(FREE, temperature=0.0)
        done, again = [await engine.generate(GenerateRequest(PROMPT, replace(greedy, seed=seed))) for seed in (1, 2)]
        likeliest = models[0].rows(PROMPT, done.tokens).argmax(-1)
        assert done.tokens.tolist() == again.tokens.tolist() == likeliest.tolist()
        assert not done.logprobs.any(), "a greedy choice is certain"

    async def test_a_seed_reproduces_and_another_one_does_not(self, engine: Engine, able: Capabilities) -> None:
        if not able.seeds:
            pytest.skip("seeds: not declared")
        first, again, other = [await engine.generate(GenerateRequest(PROMPT, replace(FREE, seed=s))) for s in (3, 3, 4)]
        assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
        np.testing.assert_allclose(again.logprobs, first.logprobs, atol=TOLERANCE)

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
    async def test_logprobs_are_the_sampled_distributions(
        self, engine: Engine, able: Capabilities, models: list[Reference], temperature: float
    ) -> None:
        if warm(able, temperature) != temperature:
            await refused(engine.generate(GenerateRequest(PROMPT, replace(FREE, temperature=temperature))), "temperature")
            pytest.skip("samples_at: another temperature is refused")
        done = await engine.generate(GenerateRequest(PROMPT, replace(FREE, temperature=temperature)))
        expected = models[0].logprobs(PROMPT, done.tokens, temperature)
        np.testing.assert_allclose(done.logprobs, expected, atol=TOLERANCE)

    async def test_tokens_come_as_often_as_their_logprobs_say(
        self, engine: Engine, able: Capabilities, models: list[Reference]
    ) -> None:
        temperature, count = warm(able, 0.8), 400
        one = replace(FREE, temperature=temperature, max_tokens=1)
        requests = [GenerateRequest(PROMPT, replace(one, seed=seed)) for seed in range(count)]
        done = await asyncio.gather(*map(engine.generate, requests))
        seen = np.bincount([int(each.tokens[0]) for each in done], minlength=VOCAB)
        expected = count * np.exp(log_softmax(models[0].rows(PROMPT, done[0].tokens)[0] / temperature))
        often = expected >= 5
        seen, expected = ([*column[often], column[~often].sum()] for column in (seen, expected))
        distance = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
        freedom = len(seen) - 1
        assert freedom >= 3 and distance < freedom + 5 * np.sqrt(2 * freedom), (seen, expected)

    async def test_a_second_turn_is_sampled_after_the_whole_history(self, engine: Engine, models: list[Reference]) -> None:
        first = await engine.generate(GenerateRequest(PROMPT, FREE, key="g0/0"))
        history = np.concatenate([PROMPT, first.tokens, prompt(1)])
        done = await engine.generate(GenerateRequest(history, replace(FREE, seed=8), key="g0/0"))
        np.testing.assert_allclose(done.logprobs, models[0].logprobs(history, done.tokens), atol=TOLERANCE)
        assert done.prompt_tokens == len(history)

    async def test_concurrent_requests_do_not_disturb_each_other(self, engine: Engine, able: Capabilities) -> None:
        params = [
            steady(able, replace(FREE, seed=i, temperature=t and warm(able, t), max_tokens=10 + 3 * i))
            for i, t in enumerate((1.0, 0.0, 0.7, 1.0, 1.3, 1.0))
        ]
        requests = [GenerateRequest(prompt(i, 3 + 4 * i), each, key=f"g{i}/0") for i, each in enumerate(params)]
        alone = [await engine.generate(request) for request in requests]
        together = await asyncio.gather(*map(engine.generate, requests))
        for one, other in zip(alone, together, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
