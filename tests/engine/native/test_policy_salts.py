"""KV of one policy, incarnation or step never gets into a prompt of another one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import BASE, MemoryReceiver, decoder, prompts, reference_logprobs

from tidemill.core.errors import PolicyMismatch
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine

TEXT = prompts(1, low=24, high=30)[0]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def engine_of(version: Version, receiver: MemoryReceiver) -> NativeEngine:
    settings = EngineSettings(device="cpu", page_size=4, max_sequences=4)
    return NativeEngine(decoder(BASE), settings, receiver=receiver, version=version, name="engine-0", eos_ids=())


@pytest.mark.parametrize("policy", ["policy", "critic"])
async def test_a_new_incarnation_of_a_step_finds_nothing_of_the_old_one(policy: str) -> None:
    receiver = MemoryReceiver()
    under_test = engine_of(Version(1, 0, policy), receiver)
    keys = [PolicyKey(policy, 0, 1), PolicyKey(policy, 0, 2), PolicyKey(policy, 1, 1), PolicyKey(policy, 1, 2)]
    for seed, key in enumerate(keys):
        if seed:
            update = receiver.publish(key.step, decoder(BASE, seed))
            version = replace(update.version, incarnation=key.incarnation, policy=policy)
            assert await under_test.update(replace(update, version=version)) == version
        first, again = [await under_test.generate(GenerateRequest(TEXT, PARAMS, policy)) for _ in range(2)]
        assert first.cached_tokens == 0 and again.cached_tokens > 0, key
        expected = reference_logprobs(decoder(BASE, seed), TEXT, again.tokens)
        np.testing.assert_allclose(again.logprobs, expected, atol=2e-5)
        assert under_test._scheduler.salts == [key]
    assert {each.salt for each in under_test._scheduler.blocks._by_key} <= {*keys}
    await under_test.close()


async def test_versions_of_a_policy_only_go_forward() -> None:
    receiver = MemoryReceiver()
    under_test = engine_of(Version(3, 1), receiver)
    update = receiver.publish(3, decoder(BASE, 1))
    for wrong, says in (
        (PolicyKey("policy", 1, 2), "versions only go forward"),
        (PolicyKey("policy", 0, 9), "versions only go forward"),
        (PolicyKey("critic", 1, 4), "not of the policy"),
    ):
        version = replace(update.version, policy=wrong.policy, incarnation=wrong.incarnation, step=wrong.step)
        receiver.models[wrong.step] = receiver.models[3]
        with pytest.raises(PolicyMismatch, match=says):
            await under_test.update(replace(update, version=version))
    with pytest.raises(ValueError, match="'critic'"):
        await under_test.generate(GenerateRequest(TEXT, PARAMS, "critic"))
    await under_test.close()
