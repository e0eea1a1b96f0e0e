"""An engine that sleeps gives its memory back, says what was lost, and goes on where it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import psutil
import pytest
from engine_cases import BASE, MemoryReceiver, decoder, engine, prompts, reference_logprobs

from tidemill.core.errors import PolicyMismatch
from tidemill.core.memory import return_free_memory
from tidemill.core.types import GenerateRequest, SamplingParams

LARGE = replace(BASE, hidden=256, heads=8, kv_heads=8, head_dim=32, intermediate=1024, vocab=8000, layers=4)
TEXT = prompts(1, 30, 31)[0]
ASKED = GenerateRequest(TEXT, SamplingParams(max_tokens=40, seed=3), key="a")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def resident() -> int:
    gc.collect()
    return_free_memory()
    return psutil.Process().memory_info().rss


async def test_the_system_has_the_memory_of_an_engine_that_sleeps():
    receiver = MemoryReceiver()
    under_test = engine(LARGE, receiver=receiver, kv_memory_mb=48, max_sequences=256)
    published = receiver.publish(1, decoder(LARGE, seed=1))
    await under_test.update(published)
    kv = under_test._cache.kv
    kv.fill_(0)  # every page is in use
    size, storage = kv.nbytes, weakref.ref(kv.untyped_storage())
    del kv
    awake = resident()
    await under_test.sleep()
    asleep = resident()
    assert size > 40 << 20 and awake - asleep >= 0.9 * size, (size, awake - asleep)
    assert storage() is None
    served = [p for d in (under_test._updates.weights.decoder, under_test._updates._staging._spare) for p in d.parameters()]
    copies = [m.numbers for _, _, m in under_test._updates.weights.decoder.packed() if m.numbers is not None]
    size = sum(p.nbytes for p in served) + 2 * sum(c.nbytes for c in copies)
    del served, copies
    await under_test.sleep(weights=True)
    assert asleep - resident() >= 0.9 * size, (size, asleep - resident())
    await under_test.wake()
    await under_test.close()


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
@pytest.mark.parametrize("updated", [True, False])
async def test_what_was_in_flight_goes_on_with_the_weights_that_came(in_flight, updated):
    receiver, models = MemoryReceiver(), [decoder(seed=i) for i in range(3)]
    under_test = engine(receiver=receiver, in_flight=in_flight)
    await under_test.update(receiver.publish(1, models[1]))
    call = asyncio.ensure_future(under_test.generate(ASKED))
    await until(lambda: under_test._activity.counters["generated_tokens"] >= 8)
    await under_test.sleep(weights=True)
    assert not under_test._updates.weights.held
    late = asyncio.ensure_future(under_test.generate(replace(ASKED, key="b")))
    await asyncio.sleep(0)
    if updated:
        assert (await under_test.update(receiver.publish(2, models[2]))).step == 2
        assert under_test._updates._staging._spare is None, "there is no second copy beside it"
    await under_test.wake()
    done, fresh = await call, await late
    newest = 2 if updated else 1
    assert set(fresh.versions.tolist()) == {newest} and (await under_test.stats()).version.step == newest
    assert done.versions[0] == 1 and done.versions[-1] == newest and len(done.tokens) == 40
    np.testing.assert_allclose(fresh.logprobs, reference_logprobs(models[newest], TEXT, fresh.tokens), atol=2e-5)
    tail = done.versions == newest  # its KV is of these weights, because all of it was computed again
    expected = reference_logprobs(models[newest], TEXT, done.tokens)
    np.testing.assert_allclose(done.logprobs[tail], expected[tail], atol=2e-5)
    await under_test.close()


async def test_with_finish_it_sleeps_when_what_was_in_flight_has_ended():
    under_test = engine(in_flight="finish", max_sequences=1)
    call = asyncio.ensure_future(under_test.generate(ASKED))
    await until(lambda: bool(under_test._scheduler.running))
    late = asyncio.ensure_future(under_test.generate(replace(ASKED, key="b")))
    await under_test.sleep()
    assert call.done() and under_test._cache is None and not late.done()
    await under_test.wake()
    assert (await late).tokens.tolist() == call.result().tokens.tolist()
    await under_test.close()


async def test_what_the_prefix_cache_lost_is_counted():
    under_test = engine(page_size=4)
    await under_test.generate(ASKED)
    cached = under_test._scheduler.blocks.cached_tokens
    again = await under_test.generate(replace(ASKED, key="b"))
    assert again.cached_tokens >= 28 and cached >= 64
    await under_test.sleep()
    await under_test.sleep()
    told = await under_test.telemetry()
    assert told.counters["lost_tokens"] >= cached and any(span.name == "asleep" for span in told.spans)
    before = told.counters["lost_tokens"]
    await under_test.wake()
    assert (await under_test.generate(replace(ASKED, key="c"))).cached_tokens == 0
    assert (await under_test.telemetry()).counters["lost_tokens"] == before
    await under_test.close()


async def test_pages_of_retired_versions_are_not_counted_as_lost():
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver, page_size=4)
    await under_test.generate(ASKED)
    for step in (1, 2, 3):
        await under_test.update(receiver.publish(step, decoder(seed=step)))
    await under_test.sleep()
    assert (await under_test.telemetry()).counters["lost_tokens"] == 0
    await under_test.close()


async def test_weights_that_could_not_come_back_are_kept():
    never_updated = engine()
    with pytest.raises(ValueError, match="was built without a receiver"):
        await never_updated.sleep(weights=True)
    assert never_updated._cache is not None and never_updated._updates.weights.held
    await never_updated.close()
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver)
    await under_test.sleep(weights=True)
    with pytest.raises(PolicyMismatch, match="has had no update since: update it first"):
        await under_test.wake()
    await under_test.update(receiver.publish(1, decoder(seed=1)))
    assert under_test._updates._staging._spare is None
    await under_test.sleep(weights=True)
    receiver.corrupt = True
    with pytest.raises(PolicyMismatch):
        await under_test.wake()
    call = asyncio.ensure_future(under_test.generate(ASKED))
    await asyncio.sleep(0)
    assert under_test._cache is None and not call.done(), "nothing is sampled from weights that nobody verified"
    receiver.corrupt = False
    await under_test.update(receiver.publish(2, decoder(seed=2)))
    await under_test.wake()
    assert set((await call).versions.tolist()) == {2}
    await under_test.close()


async def test_sleep_waits_for_the_update_under_way():
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver)
    await under_test.update(receiver.publish(1, decoder(seed=1)))
    updating = asyncio.ensure_future(under_test.update(receiver.publish(2, decoder(seed=2))))
    await asyncio.sleep(0)
    await under_test.sleep(weights=True)
    assert updating.done() and updating.result().step == 2
    await under_test.wake()
    assert set((await under_test.generate(ASKED)).versions.tolist()) == {2}
    await under_test.close()
