"""Several policies on one engine: each row is computed by its own policy's adapter, and reads no other policy's KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from adapter_contract import AdapterContract
from contract_base import EOS
from engine_cases import FAMILIES, decoder, prompts, reference_logprobs, with_pages
from gpu_in_pytorch import compute_again
from side_policies import TRAINED, AdapterReceiver, asked, expect_sampled_by, side_by_side, trained, until

from tidemill.core.interfaces import Engine
from tidemill.core.types import Completion, Finish, Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.native.adapter_staging import SidePolicies
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.adapter_config import BaseDtype
from tidemill.models.decoder import Decoder
from tidemill.models.grouped_adapters import SideAdapters
from tidemill.models.lora import merge
from tidemill.models.quantised_base import load_served
from tidemill.weight_sync.transport import make_receiver

Start = Callable[..., NativeEngine]
EVERY = (*TRAINED, "judge")


@pytest.fixture(params=["one by one", "ahead"])
async def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Builds engines and closes them. ahead: a step is launched before what the last one sampled is known."""
    engines = list[NativeEngine]()
    if request.param == "ahead":
        compute_again(monkeypatch)

    def start(receiver: Any, **settings: Any) -> NativeEngine:
        engines.append(side_by_side(receiver, **settings))
        return engines[-1]

    yield start
    for under_test in engines:
        await under_test.close()


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each step from now on, the number of its policies."""
    found, begin = list[int](), SideAdapters.begin

    def noted(adapters: SideAdapters, policies: np.ndarray, *rest: Any) -> None:
        found.append(len(np.unique(policies)))
        begin(adapters, policies, *rest)

    monkeypatch.setattr(SideAdapters, "begin", noted)
    return found


async def publish(engine: NativeEngine, receiver: AdapterReceiver, models: dict[str, Decoder], step: int = 0) -> None:
    for policy, model in models.items():
        await engine.update(receiver.publish(Version(step, policy=policy), model))


async def completed(
    engine: NativeEngine, policies: tuple[str, ...], **params: Any
) -> list[tuple[str, np.ndarray, Completion]]:
    """(policy, prompt, reply) of several requests at the same time."""
    given = [(policies[i % len(policies)], text) for i, text in enumerate(prompts(9))]
    calls = [engine.generate(asked(policy, text, seed=i, **params)) for i, (policy, text) in enumerate(given)]
    done = await asyncio.gather(*calls)
    return [(*each, completion) for each, completion in zip(given, done, strict=True)]


class TestAsOneOfSeveral(AdapterContract):
    """An engine of several policies keeps the contract of adapters for each of them."""

    def make(self, folder: Any, transport: str, base_dtype: BaseDtype) -> Engine:
        return NativeEngine(
            load_served(folder, base_dtype),
            EngineSettings(device="cpu", max_sequences=8, page_size=4),
            receiver=make_receiver(transport),
            version=SidePolicies((Version(0, policy="other"), Version(0))),
            name="engine-0",
            eos_ids=(EOS,),
        )


@pytest.mark.parametrize("chunk", [2048, 5])
@pytest.mark.parametrize("family", FAMILIES)
async def test_each_policy_samples_by_its_own_adapter_in_common_steps(
    started: Start, mixed: list[int], family: str, chunk: int
) -> None:
    arch = FAMILIES[family]
    receiver = AdapterReceiver(arch)
    under_test = started(receiver, arch=arch, prefill_chunk=chunk)
    models = {"a": trained("a", 1, arch), "b": trained("b", 1, arch)}
    await publish(under_test, receiver, models)
    models |= {"c": decoder(arch), "judge": trained("judge", 0, arch)}  # c has no version yet
    for policy, text, done in await completed(under_test, EVERY, top_logprobs=4):
        expect_sampled_by(models[policy], text, done)
        whole = np.concatenate([text, done.tokens])
        alone = await under_test.score(whole, policy, 1.0, 0)
        np.testing.assert_allclose(alone.logprobs[len(text) :], done.logprobs, atol=2e-5)
        assert alone.version == done.sources[0]
        if policy in ("a", "b"):
            sum_of_both = trained(policy, 1, arch)
            merge(sum_of_both)
            expected = reference_logprobs(sum_of_both, text, done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-4, rtol=1e-5)
    assert max(mixed) == 4, "rows of all policies were computed together"


async def test_what_it_offers_and_says_of_itself(started: Start) -> None:
    receiver = AdapterReceiver()
    under_test = started(receiver)
    able = await under_test.capabilities()
    assert able.policies and able.updates == UpdateSupport(("adapter",), several_parts=True)
    await publish(under_test, receiver, {"a": trained("a", 1)}, step=3)
    stats = await under_test.stats()
    assert stats.version.step == 3 and stats.version.policy == "a"
    for call in (under_test.generate(asked("policy", prompts(1)[0])), under_test.score(prompts(1)[0], "policy", 1.0, 0)):
        with pytest.raises(ValueError, match=r"policy 'policy' is not served here: .* serves 'a', 'b', 'c', 'judge'"):
            await call


async def test_the_same_prompt_of_two_policies_shares_neither_a_row_nor_pages(started: Start) -> None:
    receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in ("a", "b")}
    under_test = started(receiver)
    await publish(under_test, receiver, models)
    text = prompts(1, 24, 30)[0]
    order = ("a", "b", "b", "a")
    done = await asyncio.gather(*(under_test.generate(asked(policy, text, seed=i)) for i, policy in enumerate(order)))
    assert [each.cached_tokens for each in done] == [0, 0, len(text), len(text)], "twins within each policy alone"
    again = await asyncio.gather(*(under_test.generate(asked(policy, text, seed=9)) for policy in ("c", "b", "judge")))
    assert [each.cached_tokens > 0 for each in again] == [False, True, False]
    for policy, each in (*zip(order, done, strict=True), ("b", again[1])):
        expect_sampled_by(models[policy], text, each)
    expect_sampled_by(decoder(), text, again[0])
    salts = {key.salt.policy for key in under_test._scheduler.blocks._by_key}
    assert salts == {"a", "b", "c", "judge"}


async def test_an_episode_goes_on_with_each_of_its_policies(started: Start) -> None:
    """Under one key, by turns: each finds the KV of its own conversation, of an older version too."""
    receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in ("a", "b")}
    under_test = started(receiver, in_flight="keep")
    await publish(under_test, receiver, models)
    texts = dict(zip(models, prompts(2, 12, 20), strict=True))
    histories = dict[str, np.ndarray]()
    for policy, text in texts.items():
        done = await under_test.generate(asked(policy, text, "episode"))
        histories[policy] = np.concatenate([text, done.tokens, text[:2]])
    await publish(under_test, receiver, {"a": trained("a", 2)}, step=1)
    for policy, history in histories.items():
        done = await under_test.generate(asked(policy, history, "episode", max_tokens=4))
        assert done.cached_tokens >= len(history) - 8, policy
        if policy == "b":
            expect_sampled_by(models["b"], history, done)
    swapped = await under_test.generate(asked("a", histories["b"], "episode", max_tokens=4))
    assert swapped.cached_tokens == 0
    expect_sampled_by(trained("a", 2), histories["b"], swapped)


async def test_tokens_name_the_versions_of_their_own_policy(started: Start) -> None:
    receiver = AdapterReceiver()
    under_test = started(receiver)
    for step in (1, 2):
        await publish(under_test, receiver, {"a": trained("a", step)}, step)
        await publish(under_test, receiver, {"b": trained("b", step)}, step + 10)
    await publish(under_test, receiver, {"b": trained("b", 3)}, 13)
    judge = trained("judge", 0)
    expected = {"a": (2, trained("a", 2)), "b": (13, trained("b", 3)), "c": (-1, decoder()), "judge": (0, judge)}
    for policy, text, done in await completed(under_test, EVERY):
        step, model = expected[policy]
        assert done.versions.tolist() == [step] * 20 and len(done.sources) == 1
        assert (done.sources[0].policy, done.sources[0].step) == (policy, step)
        assert bool(done.sources[0].fingerprint) == (policy != "c")
        expect_sampled_by(model, text, done)
    assert done.sources[0].fingerprint


async def test_preempted_rows_go_on_with_their_own_policy(
    started: Start, mixed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pages(monkeypatch, 26)
    receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in TRAINED}
    under_test = started(receiver)
    await publish(under_test, receiver, models)
    for policy, text, done in await completed(under_test, TRAINED, max_tokens=40):
        expect_sampled_by(models[policy], text, done)
    assert (await under_test.stats()).preemptions > 0 and max(mixed) > 1


@pytest.mark.parametrize("method", ["ngram", "rollouts"])
async def test_drafts_change_nothing(started: Start, method: str) -> None:
    replies = list[list[Completion]]()
    for drafts in (method, "none"):
        receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in ("a", "b")}
        under_test = started(receiver, speculation={"method": drafts})
        await publish(under_test, receiver, models)
        text = np.tile(prompts(1, 5, 6)[0], 4)
        for _ in range(2):  # the second time there are earlier replies
            calls = [under_test.generate(asked(policy, text, temperature=0.0, max_tokens=40)) for policy in models]
            replies.append(await asyncio.gather(*calls))
        assert ((await under_test.stats()).drafted_tokens > 0) == (drafts == method)
    for found in replies:
        for reply, plain in zip(found, replies[-1], strict=True):
            assert reply.tokens.tolist() == plain.tokens.tolist()
            np.testing.assert_allclose(reply.logprobs, plain.logprobs, atol=2e-5)


async def test_an_abort_ends_the_requests_of_all_policies(started: Start) -> None:
    under_test = started(AdapterReceiver())
    text = prompts(1)[0]
    calls = [asyncio.ensure_future(under_test.generate(asked(each, text, "k", max_tokens=60))) for each in EVERY]
    await until(lambda: under_test._activity.counters["generated_tokens"] > 8)
    await under_test.abort("k")
    assert {done.finish for done in await asyncio.gather(*calls)} == {Finish.CANCELLED}
    assert under_test._scheduler.in_flight == under_test._scheduler.begun(range(4)) == 0


async def test_it_sleeps_without_its_cache_but_keeps_its_weights(started: Start) -> None:
    receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in ("a", "b")}
    under_test = started(receiver)
    await publish(under_test, receiver, models)
    with pytest.raises(ValueError, match=r"sleep\(weights=True\): engine engine-0 serves several policies"):
        await under_test.sleep(weights=True)
    texts = dict(zip(models, prompts(2), strict=True))
    calls = {p: asyncio.ensure_future(under_test.generate(asked(p, texts[p], max_tokens=40))) for p in models}
    await until(lambda: under_test._activity.counters["generated_tokens"] > 12)
    await under_test.sleep()
    await publish(under_test, receiver, {"a": trained("a", 2)}, step=1)
    await under_test.wake()
    done = {policy: await call for policy, call in calls.items()}
    assert set(done["a"].versions.tolist()) == {0, 1} and set(done["b"].versions.tolist()) == {0}
    expect_sampled_by(models["b"], texts["b"], done["b"])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
async def test_bfloat16_stays_close_to_its_own_full_forward(stored: torch.dtype) -> None:
    """Adapters are computed in the dtype that is served, as under a trainer's autocast, in whichever they came."""
    receiver = AdapterReceiver(dtype=torch.bfloat16)
    under_test = side_by_side(receiver, dtype="bfloat16")
    await publish(under_test, receiver, {p: trained(p, 1, dtype=stored) for p in ("a", "b")})
    models = {p: trained(p, 1, dtype=torch.bfloat16) for p in ("a", "b")}
    models |= {"c": decoder(dtype=torch.bfloat16), "judge": trained("judge", 0, dtype=torch.bfloat16)}
    for policy, text, done in await completed(under_test, EVERY):
        gap = np.abs(done.logprobs - reference_logprobs(models[policy], text, done.tokens))
        assert gap.mean() < 0.05, policy  # bfloat16 has eight bits; weights are large here
    for number, policy in enumerate(("a", "b")):
        adapters = under_test._updates.weights.adapters
        assert adapters is not None
        placed = adapters.by_policy[number]
        assert placed is not None and placed.version.policy == policy
        assert all(a.dtype == torch.bfloat16 for each in filter(None, placed.matrices) for a in each.a)
    await under_test.close()


async def test_a_seed_repeats_its_tokens_whatever_else_is_sampled(started: Start) -> None:
    receiver, models = AdapterReceiver(), {policy: trained(policy, 1) for policy in ("a", "b")}
    under_test = started(receiver)
    await publish(under_test, receiver, models)
    text = prompts(1)[0]
    alone = await under_test.generate(asked("b", text, seed=4))
    together = await asyncio.gather(*(under_test.generate(asked(policy, text, seed=4)) for policy in EVERY))
    assert together[1].tokens.tolist() == alone.tokens.tolist()
    assert len({tuple(each.tokens.tolist()) for each in together}) == 4, "the policies differ"
