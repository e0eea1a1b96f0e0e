"""Random requests and updates of several policies: every token is of the version that its policy had at its step."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engine_cases import decoder, prompts, reference_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from side_policies import TRAINED, AdapterReceiver, asked, side_by_side, trained

from tidemill.core.types import Completion, Version
from tidemill.engine.native import native_engine, weight_updates
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.step_plan import Plan
from tidemill.models.decoder import Decoder

EVERY = (*TRAINED, "judge")
TEXTS = prompts(4, 4, 14)

requests = st.tuples(st.just("generate"), st.sampled_from(EVERY), st.integers(0, 3), st.integers(1, 70))
updates = st.tuples(st.just("update"), st.sampled_from(TRAINED), st.just(0), st.just(0))
others = st.tuples(st.sampled_from(["score", "abort"]), st.sampled_from(EVERY), st.integers(0, 3), st.just(0))
actions = st.lists(st.tuples(st.one_of(requests, requests, updates, others), st.integers(0, 20)), min_size=8, max_size=24)


@lru_cache(maxsize=64)
def model_of(policy: str, step: int) -> Decoder:
    return trained(policy, step) if step >= 0 else decoder()


class Witness:
    """Sees each step as it is computed: which adapters it was given, and whose rows it sampled."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.sampled = defaultdict[Any, list[Version]](list)  # by request, the version of each token
        self._run = native_engine.run

    def run(self, weights: Any, cache: Any, plan: Plan, *rest: Any) -> Any:
        names = list(self.engine._updates.served.numbers)
        for row, slot in zip(plan.sample_rows, plan.sample_slots, strict=True):
            request = self.engine._slots.requests[slot]
            number = self.engine._scheduler.running[slot].policy
            assert plan.policies[row] == number, "it is grouped with its own policy's rows"
            placed = weights.adapters.by_policy[number]
            version = Version(-1, policy=names[number]) if placed is None else placed.version
            self.sampled[request.sequence].append(version)
        return self._run(weights, cache, plan, *rest)


async def played(engine: NativeEngine, receiver: AdapterReceiver, wanted: list[Any]) -> list[tuple[Any, Any, Completion]]:
    """Act as the test asks, and give what was generated: (request, its sequence, its completion)."""
    steps = dict.fromkeys(TRAINED, -1)
    running, side, updating = list[Any](), list[Any](), list[Any]()
    for (kind, policy, number, tokens), wait in wanted:
        if kind == "generate":
            request = asked(policy, TEXTS[number], f"key{number}", max_tokens=tokens, seed=len(running))
            before = set(engine._requests.under_way)
            call = asyncio.ensure_future(engine.generate(request))
            await asyncio.sleep(0)
            [sequence] = [each for each in engine._requests.under_way if each not in before and not each.probe]
            running.append((request, sequence, call))
        elif kind == "update":
            steps[policy] += 1
            version = Version(steps[policy], policy=policy)
            updating.append(asyncio.ensure_future(engine.update(receiver.publish(version, model_of(policy, version.step)))))
        elif kind == "score":
            side.append((policy, number, asyncio.ensure_future(engine.score(TEXTS[number], policy, 1.0, 0))))
        else:
            await engine.abort(f"key{number}")
        for _ in range(wait):
            await asyncio.sleep(0)
    done = [(request, sequence, await call) for request, sequence, call in running]
    for policy, number, call in side:
        scored = await call
        assert scored.version.policy == policy
        text = TEXTS[number]
        model = model_of(policy, scored.version.step)
        np.testing.assert_allclose(scored.logprobs[1:], reference_logprobs(model, text[:1], text[1:]), atol=1e-4)
    for call in updating:
        await call
    return done


@pytest.mark.runs
@pytest.mark.parametrize("mode", ["keep", "recompute", "finish"])
@given(
    actions,
    st.sampled_from([3, 2048]),
    st.sampled_from([2, 8]),
    st.sampled_from([None, 24]),
    st.sampled_from([0.0, math.inf]),
)
@settings(max_examples=30, derandomize=True)
def test_every_token_is_of_the_version_that_its_policy_had(
    mode: str, wanted: list[Any], chunk: int, slots: int, pages: int | None, turn_s: float
) -> None:
    """turn_s: an update takes its turns piece by piece, or all at once."""

    async def play() -> None:
        receiver, witness = AdapterReceiver(), Witness()
        few = patch.object(native_engine, "pages_of", lambda *_: 200 if pages is None else pages + 1)
        steady = patch.multiple(weight_updates, TURN_S=turn_s, SHARE=0.0)  # however fast this machine is
        with few, steady, patch.object(native_engine, "run", witness.run):
            engine = side_by_side(receiver, in_flight=mode, prefill_chunk=chunk, max_sequences=slots)
            witness.engine = engine
            try:
                async with asyncio.timeout(120):
                    done = await played(engine, receiver, wanted)
            finally:
                await engine.close()
        for request, sequence, completion in done:
            versions = witness.sampled[sequence]
            assert completion.versions.tolist() == [each.step for each in versions][: len(completion.tokens)]
            assert len(completion.tokens) == len(versions)
            assert {each.policy for each in (*versions, *completion.sources)} <= {request.policy}
            if mode != "keep":  # else a token's KV may be of several versions
                text, tokens = request.tokens, completion.tokens
                for step in set(completion.versions.tolist()):
                    model = model_of(request.policy, step)
                    at = completion.versions == step
                    expected = reference_logprobs(model, text, tokens)
                    np.testing.assert_allclose(completion.logprobs[at], expected[at], atol=1e-4)
            if mode == "finish":
                assert len(completion.sources) <= 1

    asyncio.run(play())
