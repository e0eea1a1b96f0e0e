"""The engine as its callers see it: ends, aborts, updates, failures, sleep."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import BASE, MemoryReceiver, decoder, engine, prompts, reference_logprobs, with_pages
from gpu_in_pytorch import compute_again

import tidemill.engine.native.native_engine as core
from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.executors import background
from tidemill.core.interfaces import Engine
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Constraint, Finish, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.engine.native import weight_updates
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.observability.timeline import IDLE


@pytest.fixture(params=["one by one", "ahead"])
async def started(request, monkeypatch):
    """Builds engines and closes them. ahead: a step is launched before what the last one sampled is known."""
    engines = []
    if request.param == "ahead":
        compute_again(monkeypatch)

    def start(**settings):
        engines.append(engine(**settings))
        return engines[-1]

    yield start
    for under_test in engines:
        await under_test.close()


async def until(condition, steps=10000):
    for _ in range(steps):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def prompt(seed=0):
    return prompts(1, 10, 11, seed)[0]


async def test_ends(started):
    free = started()
    assert isinstance(free, Engine)
    whole = await free.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=200, seed=1)))
    assert whole.finish is Finish.CONTEXT and len(whole.tokens) == BASE.context - 10
    assert whole.engine == "engine-0" and whole.queued_s >= 0 and whole.sources == (Version(0),)
    assert (whole.versions == 0).all() and whole.tokens.dtype == whole.versions.dtype == np.int32
    stop = int(whole.tokens[7])
    first = int(np.flatnonzero(whole.tokens == stop)[0])
    stopped = await free.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=200, seed=1, stop_ids=(99, stop))))
    assert stopped.finish is Finish.STOP and stopped.tokens.tolist() == whole.tokens[: first + 1].tolist()
    last = SamplingParams(max_tokens=first + 1, seed=1, stop_ids=(stop,))
    assert (await free.generate(GenerateRequest(prompt(), last))).finish is Finish.STOP, "stop comes before length"
    with_eos = started(eos_ids=(stop,))
    assert (await with_eos.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=50, seed=1)))).finish is Finish.STOP
    ignoring = await with_eos.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=50, seed=1, ignore_eos=True)))
    assert ignoring.finish is Finish.LENGTH and ignoring.tokens.tolist() == whole.tokens[:50].tolist()


async def test_what_cannot_be_served_is_refused(started):
    under_test = started()
    params = SamplingParams()
    for tokens, policy, message in (
        (np.zeros(96, np.int32), "policy", "context of 96"),
        (np.zeros(0, np.int32), "policy", "at least one token"),
        (np.array([BASE.vocab], np.int32), "policy", "this model knows"),
        (np.array([-1], np.int32), "policy", "this model knows"),
        (np.array([0.5]), "policy", "at least one token"),
        (prompt(), "teacher", "'teacher' is not served"),
    ):
        with pytest.raises(ValueError, match=message):
            await under_test.generate(GenerateRequest(tokens, params, policy))
    with pytest.raises(ValueError, match="engine engine-0 has no vocabulary to hold a reply to a grammar"):
        await under_test.generate(GenerateRequest(prompt(), params, constraint=Constraint("regex", "[0-9]+")))
    with pytest.raises(ValueError, match="temperature"):
        await under_test.score(prompt(), "policy", 0.0, 0)
    assert len((await under_test.generate(GenerateRequest(np.zeros(95, np.int32), params))).tokens) == 1
    assert (await under_test.score(np.zeros(96, np.int32), "policy", 1.0, 0)).logprobs.shape == (96,)
    with pytest.raises(ValueError, match="kv_memory_mb"):
        started(kv_memory_mb=1, page_size=1 << 16)


async def test_abort_and_cancel_give_everything_back(started):
    under_test = started(max_sequences=2)
    params = SamplingParams(max_tokens=80, seed=2)
    calls = [
        asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(i), params, key="ab"[i % 2]))) for i in range(6)
    ]
    scheduler = under_test._scheduler
    await until(lambda: scheduler.running and min(scheduler.length[s] for s in scheduler.running) > 14)
    await under_test.abort("a")
    done = await asyncio.gather(*calls[::2])
    assert {c.finish for c in done} == {Finish.CANCELLED}
    assert len(done[0].tokens) >= 4 and [len(c.tokens) for c in done[1:]] == [0, 0]
    np.testing.assert_allclose(done[0].logprobs, reference_logprobs(decoder(), prompt(0), done[0].tokens), atol=2e-5)
    calls[1].cancel()
    calls[5].cancel()
    assert (await calls[3]).finish is Finish.LENGTH
    await under_test.abort("unknown")
    await until(lambda: under_test._loop.done())  # its integrity check passed
    assert scheduler.blocks.available == scheduler.blocks.usable and not under_test._requests._by_key
    assert not under_test._requests.under_way and scheduler.in_flight == 0


async def test_stream(started):
    under_test = started()
    params = SamplingParams(max_tokens=9, seed=4, top_logprobs=2)
    expected = await under_test.generate(GenerateRequest(prompt(), params))
    stream = under_test.stream(GenerateRequest(prompt(), params, key="k"))
    got = [item async for item in stream]
    assert [g[0] for g in got] == expected.tokens.tolist() and stream.completion.finish is Finish.LENGTH
    np.testing.assert_allclose([g[1] for g in got], expected.logprobs, atol=1e-6)
    assert [i for i, _ in got[3][3]] == expected.top_ids[3].tolist()
    assert [item async for item in stream] == []
    left = under_test.stream(GenerateRequest(prompt(), SamplingParams(max_tokens=80), key="k"))
    assert isinstance((await anext(left))[0], int)
    await left.aclose()
    assert not under_test._requests.under_way
    ending = under_test.stream(GenerateRequest(prompt(), SamplingParams(max_tokens=80), key="k"))
    await anext(ending)
    await under_test.abort("k")
    async for _ in ending:
        pass
    assert ending.completion.finish is Finish.CANCELLED


def mixed_reference(completion, models):
    """Logprobs of each token under the model of its stamp, all of the prefix computed by that model."""
    rows = [reference_logprobs(m, prompt(), completion.tokens) for m in models]
    return np.stack(rows)[completion.versions, np.arange(len(completion.tokens))]


async def update_now(under_test, published, monkeypatch):
    """Begin an update that is staged in one turn: the commit finds what is in flight now."""
    monkeypatch.setattr(weight_updates, "TURN_S", math.inf)
    return asyncio.ensure_future(under_test.update(published))


async def in_the_middle(under_test, receiver, new, monkeypatch, key="episode"):
    """A completion that is in flight while version 1 is committed."""
    published = receiver.publish(1, new)
    call = asyncio.ensure_future(
        under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=75, seed=5), key=key))
    )
    scheduler = under_test._scheduler
    await until(lambda: scheduler.running and scheduler.length[next(iter(scheduler.running))] > 20)
    return call, await update_now(under_test, published, monkeypatch)


async def test_update_recompute(started, monkeypatch):
    receiver, new = MemoryReceiver(), decoder(seed=1)
    under_test = started(receiver=receiver, in_flight="recompute")
    call, update = await in_the_middle(under_test, receiver, new, monkeypatch)
    version = await update
    assert version.step == 1 and version.fingerprint
    completion = await call
    assert set(completion.versions.tolist()) == {0, 1} and (np.diff(completion.versions) >= 0).all()
    assert completion.sources == (Version(0), version)
    # Prefilled again by the new weights: each token's logprob is that of the one model of its stamp.
    np.testing.assert_allclose(completion.logprobs, mixed_reference(completion, [decoder(), new]), atol=2e-5)


async def test_update_keep(started, monkeypatch):
    receiver, new = MemoryReceiver(), decoder(seed=1)
    under_test = started(receiver=receiver, in_flight="keep")
    call, update = await in_the_middle(under_test, receiver, new, monkeypatch)
    await update
    completion = await call
    first = int(np.flatnonzero(completion.versions == 1)[0])
    assert first > 10 and (completion.versions[first:] == 1).all() and [v.step for v in completion.sources] == [0, 1]
    gap = np.abs(completion.logprobs - mixed_reference(completion, [decoder(), new]))
    assert gap[:first].max() < 1e-5 and gap[first:].max() > 1e-3, "the KV of the old weights is kept"
    # The episode goes on with the salt of its first turn; a new one does not find KV of the old weights, nor does one
    # that is called by the same name and is another.
    history = np.concatenate([prompt(), completion.tokens, prompt()[:2]])
    again = await under_test.generate(GenerateRequest(history, SamplingParams(max_tokens=4), key="episode"))
    other = await under_test.generate(GenerateRequest(history, SamplingParams(max_tokens=4), key="another"))
    assert again.cached_tokens >= len(history) - 8 and other.cached_tokens == 0
    np.testing.assert_allclose(other.logprobs, reference_logprobs(new, history, other.tokens), atol=2e-5)
    namesake = await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=4), key="episode"))
    np.testing.assert_allclose(namesake.logprobs, reference_logprobs(new, prompt(), namesake.tokens), atol=2e-5)


async def test_update_finish(started, monkeypatch):
    receiver, new = MemoryReceiver(), decoder(seed=1)
    under_test = started(receiver=receiver, in_flight="finish", max_sequences=2)
    call, update = await in_the_middle(under_test, receiver, new, monkeypatch)
    await until(lambda: under_test._updates._draining is not None)
    late = asyncio.ensure_future(
        under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=5, seed=5), key="episode"))
    )
    assert (await call).sources == (Version(0),) and not (await call).versions.any()
    assert (await update).step == 1
    completion = await late
    assert (completion.versions == 1).all() and completion.cached_tokens == 0
    np.testing.assert_allclose(completion.logprobs, reference_logprobs(new, prompt(), completion.tokens), atol=2e-5)


async def test_finish_commits_when_what_was_in_flight_is_aborted(started, monkeypatch):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver, in_flight="finish", max_sequences=1)
    call, update = await in_the_middle(under_test, receiver, decoder(seed=1), monkeypatch)
    await until(lambda: under_test._updates._draining is not None)
    late = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=5))))
    await asyncio.sleep(0)
    await under_test.abort("episode")
    assert (await call).finish is Finish.CANCELLED and (await update).step == 1
    assert (await late).versions.tolist() == [1] * 5


@pytest.mark.parametrize("mode", ["keep", "finish", "recompute"])
async def test_a_score_is_of_one_version(started, mode, monkeypatch):
    receiver, new = MemoryReceiver(), decoder(seed=1)
    under_test = started(receiver=receiver, in_flight=mode, prefill_chunk=1)
    text, published = prompts(1, 90, 91)[0], receiver.publish(1, new)
    call = asyncio.ensure_future(under_test.score(text, "policy", 1.0, 2))
    scheduler = under_test._scheduler
    await until(lambda: scheduler.running and scheduler.computed[next(iter(scheduler.running))] > 2)
    await (await update_now(under_test, published, monkeypatch))
    result = await call
    model = new if result.version.step == 1 else decoder()
    assert result.version.step == (0 if mode == "finish" else 1)
    np.testing.assert_allclose(result.logprobs[1:], reference_logprobs(model, text[:1], text[1:]), atol=2e-5)


async def test_updates_one_after_another_and_only_forward(started):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver)
    published = [receiver.publish(i, decoder(seed=i)) for i in (1, 2, 3)]
    call = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=85))))
    versions = await asyncio.gather(*(under_test.update(p) for p in published))
    assert [v.step for v in versions] == [1, 2, 3]
    await call
    with pytest.raises(PolicyMismatch, match="only go forward"):
        await under_test.update(published[1])
    assert (await under_test.stats()).version == published[2].version
    after = await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=5)))
    np.testing.assert_allclose(after.logprobs, reference_logprobs(decoder(seed=3), prompt(), after.tokens), atol=2e-5)
    telemetry = await under_test.telemetry()
    names = [s.name for s in telemetry.spans]
    for name in ("stage", "commit", "prove"):
        assert list(dict.fromkeys(s.args["step"] for s in telemetry.spans if s.name == name)) == [1, 2, 3], name
    assert names.count("commit") == 3 and "generate" in names
    assert all(s.end >= s.start for s in telemetry.spans) and telemetry.counters["generated_tokens"] == 90
    assert telemetry.memory_bytes > 1 << 20 and {s.name for s in (await under_test.telemetry()).spans} <= {"yield", IDLE}


async def test_the_cache_does_not_fill_with_what_versions_long_gone_computed(started):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver, prefix_cache=True)
    blocks, touched = under_test._scheduler.blocks, set[int]()
    take = blocks._take
    blocks._take = lambda: (page := take(), touched.add(page))[0]
    counts = []
    for step in range(1, 31):
        await under_test.update(receiver.publish(step, decoder(seed=step)))
        await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=30, ignore_eos=True), key=str(step)))
        counts.append(len(touched))
    assert counts[5] == counts[-1] < blocks.usable, counts
    for version in range(25, 31):  # those of the two latest may be found again
        assert (PolicyKey(step=version) in {key.salt for key in blocks._by_key} - blocks._retired.keys()) == (version > 28)


@pytest.mark.parametrize("last", [True, False])
async def test_of_a_last_turn_the_prompt_is_kept_and_no_more(started, last):
    under_test = started(prefix_cache=True, page_size=4)
    blocks = under_test._scheduler.blocks
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, last=last)
    whole = await under_test.generate(GenerateRequest(prompt(), params, key="a"))
    cached = {key.tokens for key in blocks._by_key}
    row = np.concatenate([prompt(), whole.tokens])
    pages = [row[at : at + 4].tobytes() for at in range(0, 36, 4)]  # its last token was not computed
    assert cached == set(pages[:2] if last else pages)
    sibling = await under_test.generate(GenerateRequest(prompt(), replace(params, seed=2), key="b"))
    assert sibling.cached_tokens == 8
    one = replace(params, max_tokens=1)
    following = await under_test.generate(GenerateRequest(row, one, key="a"))  # asked for all the same
    assert following.cached_tokens == (8 if last else 36)
    again = started(prefix_cache=False)
    fresh = await again.generate(GenerateRequest(row, one))
    assert following.tokens.tolist() == fresh.tokens.tolist()


async def test_a_last_turn_that_was_preempted_finds_what_it_had_sampled(started):
    under_test = started(prefix_cache=True, page_size=4)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, last=True)
    asked = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), params, key="a")))
    scheduler = under_test._scheduler
    await until(lambda: scheduler.running and scheduler.computed[0] == 30)
    under_test._settle()
    scheduler.preempt_all()
    assert len(scheduler.blocks._by_key) == 7
    plain = await started().generate(GenerateRequest(prompt(), params))
    assert (await asked).tokens.tolist() == plain.tokens.tolist()


async def test_a_cancelled_update_leaves_the_spare_weights_alone_that_a_thread_writes_to(started):
    """As it is for a device: elsewhere an update is cancelled between two turns, see `test_engine_turns`."""

    class Slow(MemoryReceiver):
        reading, go_on = threading.Event(), threading.Event()

        def receive(self, published):
            self.reading.set()
            assert self.go_on.wait(30)
            return super().receive(published)

    receiver = Slow()
    under_test = started(receiver=receiver)
    under_test._updates._tells_device = background("staging")
    first = asyncio.ensure_future(under_test.update(receiver.publish(1, decoder(seed=1))))
    await asyncio.to_thread(receiver.reading.wait)
    second = asyncio.ensure_future(under_test.update(receiver.publish(2, decoder(seed=2))))
    first.cancel()
    await asyncio.wait([first], timeout=0.05)
    assert not first.done(), "its thread still writes to the spare decoder, so the next update has to wait"
    receiver.go_on.set()
    assert (await second).step == 2 and first.cancelled()
    did = sorted((s for s in (await under_test.telemetry()).spans if s.name != IDLE), key=lambda s: s.start)
    assert [s.name for s in did] == ["stage", "stage", "commit", "prove"]


async def test_wrong_weights_are_refused_and_the_old_ones_served(started):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver)
    before = await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=8, seed=3)))
    published = receiver.publish(1, decoder(seed=1))
    receiver.corrupt = True
    with pytest.raises(PolicyMismatch) as error:
        await under_test.update(published)
    assert published.version.fingerprint in str(error.value) and "v0" in str(error.value)
    receiver.models[1] = decoder(replace(BASE, hidden=40), seed=1)
    with pytest.raises(PolicyMismatch, match="not this model's weights"):
        await under_test.update(published)
    with pytest.raises(PolicyMismatch, match="without a fingerprint"):
        await under_test.update(WeightUpdate(Version(1), (WeightPart("memory", "1"),)))
    again = await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=8, seed=3)))
    np.testing.assert_array_equal(before.tokens, again.tokens)
    assert (again.versions == 0).all() and (await under_test.stats()).version == Version(0)
    receiver.corrupt, receiver.models[1] = False, decoder(seed=1)
    assert (await under_test.update(published)).step == 1


async def test_bfloat16_serves_what_was_published_in_bfloat16(started):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver, dtype="bfloat16")
    new = decoder(seed=1)
    version = await under_test.update(receiver.publish(1, new, torch.bfloat16))
    assert version == receiver.publish(1, new, torch.bfloat16).version
    with pytest.raises(PolicyMismatch):  # a fingerprint is of the served dtype
        await under_test.update(receiver.publish(2, decoder(seed=2), torch.float32))


async def test_a_failing_step_fails_everybody(started, monkeypatch):
    under_test = started(max_sequences=2)
    params = SamplingParams(max_tokens=80)
    calls = [asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(i), params))) for i in range(4)]
    calls.append(asyncio.ensure_future(under_test.score(prompt(), "policy", 1.0, 0)))
    stream = under_test.stream(GenerateRequest(prompt(), params))
    await until(lambda: under_test._scheduler.running)
    for way in ("run", "launch"):
        monkeypatch.setattr(core, way, lambda *a: (_ for _ in ()).throw(MemoryError("out of memory")))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(r), type(r.__cause__)) for r in results] == [(EngineFailed, MemoryError)] * 5
    with pytest.raises(EngineFailed, match="out of memory"):
        async for _ in stream:
            pass
    for call in (under_test.generate(GenerateRequest(prompt(), params)), under_test.score(prompt(), "policy", 1.0, 0)):
        with pytest.raises(RuntimeError, match=r"engine-0 has stopped.*out of memory"):
            await call


async def test_nan_weights_are_noticed(started):
    under_test = started()
    under_test._updates.weights.decoder.norm.weight[:] = torch.nan
    with pytest.raises(EngineFailed, match="not finite"):
        await under_test.generate(GenerateRequest(prompt(), SamplingParams()))


async def test_a_leak_is_noticed_when_the_engine_goes_idle(started):
    under_test = started()
    under_test._scheduler.blocks.allocate(1)
    await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=3)))
    await until(lambda: under_test._loop.done())
    with pytest.raises(RuntimeError, match="KV pages leaked"):
        await under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=3)))


async def test_sleep_and_wake(started):
    receiver = MemoryReceiver()
    under_test = started(receiver=receiver)
    params = SamplingParams(max_tokens=60, seed=8)
    expected = await under_test.generate(GenerateRequest(prompt(), params))
    call = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), params)))
    await until(lambda: under_test._scheduler.running)
    await under_test.sleep()
    await under_test.sleep()
    assert under_test._cache is None
    late = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), params)))
    scored = asyncio.ensure_future(under_test.score(prompt(), "policy", 1.0, 0))
    before = under_test.progress()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not (call.done() or late.done() or scored.done()), "what comes while it sleeps waits"
    assert under_test.progress() > before, "and nobody takes it for stuck"
    await under_test.wake()
    await under_test.wake()
    np.testing.assert_array_equal((await call).tokens, expected.tokens)
    np.testing.assert_array_equal((await late).tokens, expected.tokens)
    assert len((await scored).logprobs) == len(prompt())
    await under_test.sleep()
    assert (await under_test.update(receiver.publish(1, decoder(seed=1)))).step == 1
    await under_test.wake()
    assert (await under_test.generate(GenerateRequest(prompt(), params))).versions.tolist() == [1] * 60


async def test_close_ends_what_is_pending():
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver)
    call = asyncio.ensure_future(under_test.generate(GenerateRequest(prompt(), SamplingParams(max_tokens=80))))
    await until(lambda: under_test._scheduler.running)
    await under_test.close()
    await under_test.close()
    with pytest.raises(RuntimeError, match="was closed"):
        await call
    with pytest.raises(EngineFailed, match="was closed"):
        await under_test.generate(GenerateRequest(prompt(), SamplingParams()))
    assert receiver.closed and under_test._loop.done()


async def test_a_lone_sequence_never_starves(monkeypatch, started):
    with_pages(monkeypatch, 4)
    under_test = started(max_sequences=3)
    done = await asyncio.gather(
        *(under_test.generate(GenerateRequest(prompt(i), SamplingParams(max_tokens=50, seed=i))) for i in range(3))
    )
    assert [c.finish for c in done] == [Finish.CONTEXT] * 3 and [len(c.tokens) for c in done] == [6] * 3
    assert (await under_test.capabilities()).context == 16


def test_memory_settings_decide_the_pages():
    each = 2 * 2 * 4 * 2 * 8 * 4  # layers, heads, page, key and value, head size, bytes
    assert engine(kv_memory_mb=1)._pages == (1 << 20) // each
    assert engine()._pages == 8 * 96 // 4 + 1  # every row's whole context
    assert EngineSettings().page_size == 16
