"""What an engine proves before it confirms a version, what an interrupted update leaves, and that a version's tokens have
that version's KV."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import MemoryReceiver, decoder, engine, prompts, reference_logprobs

from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.executors import background
from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import UpdateSupport, WeightPart, WeightUpdate
from tidemill.engine.native import weight_updates
from tidemill.engine.native.staged_weights import Staging, serve
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_blocks, serving_slices
from tidemill.models.piecewise import at_once
from tidemill.models.served_weights import Contents, checked, words_of
from tidemill.models.weight_slices import Slice
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender


async def until(condition) -> None:
    for _ in range(10000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def announce(sender: Any, step: int, model: Decoder) -> WeightUpdate:
    own = Contents.of(model, torch.float32)
    return sender.send(Version(step, fingerprint=own.fingerprint), checked(serving_slices(model, torch.float32), own))


class Paused:
    """A receiver that stops in the middle of a version until it is let go on."""

    def __init__(self, inner: Any) -> None:
        self.takes = inner.takes
        self.inner, self.reached, self.go_on = inner, threading.Event(), threading.Event()

    def receive(self, published: WeightUpdate) -> Iterator[Slice]:
        if sys.platform == "linux":
            self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        for count, piece in enumerate(self.inner.receive(published)):
            if count == 5 and not self.go_on.is_set():
                self.reached.set()
                assert self.go_on.wait(30)
            yield piece

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
async def test_an_update_cancelled_while_a_thread_stages_leaves_the_old_version_and_the_next_whole(
    transport, tmp_path: Path
):
    """As it is for a device."""
    sender = make_sender(SyncSettings(transport=transport), tmp_path)
    receiver = Paused(make_receiver(transport))
    under_test = engine(receiver=receiver)  # type: ignore[arg-type]
    under_test._updates._tells_device = background("staging")
    new, text, params = decoder(seed=2), prompts(1)[0], SamplingParams(max_tokens=6, seed=1)
    try:
        updating = asyncio.ensure_future(under_test.update(announce(sender, 1, decoder(seed=1))))
        assert await asyncio.to_thread(receiver.reached.wait, 30)
        updating.cancel()
        between = await under_test.generate(GenerateRequest(text, params))
        assert between.sources == (Version(0),)
        if sys.platform == "linux":
            assert receiver.priority == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19), "staging goes behind what generates"
        np.testing.assert_allclose(between.logprobs, reference_logprobs(decoder(), text, between.tokens), atol=2e-5)
        receiver.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        published = announce(sender, 2, new)
        assert await under_test.update(published) == published.version
        after = await under_test.generate(GenerateRequest(text, params))
        assert after.sources == (published.version,)
        np.testing.assert_allclose(after.logprobs, reference_logprobs(new, text, after.tokens), atol=2e-5)
    finally:
        receiver.go_on.set()
        await under_test.close()
        sender.close()


async def test_the_transport_of_an_engine_limits_the_updates_it_takes():
    for receiver, takes in ((MemoryReceiver(), UpdateSupport()), (None, UpdateSupport(()))):
        under_test = engine(receiver=receiver)
        assert (await under_test.capabilities()).updates == takes
        with pytest.raises((ValueError, RuntimeError), match=r"in 1 part, but policy@v1 has 2|cannot be updated"):
            await under_test.update(WeightUpdate(Version(1, fingerprint="f"), (WeightPart("memory", "1"),) * 2))
        await under_test.close()


@pytest.mark.parametrize("chunk", [1, 7])
async def test_a_prompt_that_straddles_a_commit_is_computed_again(chunk, monkeypatch):
    """All its tokens are the new version's: were half of its KV the old one's, its logprobs would be nobody's."""
    monkeypatch.setattr(weight_updates, "TURN_S", math.inf)
    receiver, new = MemoryReceiver(), decoder(seed=1)
    under_test = engine(receiver=receiver, prefill_chunk=chunk, page_size=4)
    scheduler, params = under_test._scheduler, SamplingParams(max_tokens=6, seed=3)
    text = prompts(1, 40, 41)[0]
    try:
        calls = [
            asyncio.ensure_future(under_test.generate(GenerateRequest(text, params, key=f"episode{i}"))) for i in range(2)
        ]
        await until(lambda: scheduler.running and scheduler.computed[next(iter(scheduler.running))] > 8)
        published = receiver.publish(1, new)
        await under_test.update(published)
        for completion in await asyncio.gather(*calls):
            assert completion.sources == (published.version,)
            np.testing.assert_allclose(completion.logprobs, reference_logprobs(new, text, completion.tokens), atol=2e-5)
        again = await under_test.generate(GenerateRequest(text, params, key="late"))
        assert again.cached_tokens > 0
        np.testing.assert_allclose(again.logprobs, reference_logprobs(new, text, again.tokens), atol=2e-5)
    finally:
        await under_test.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_change_behind_the_commit_end_the_engine(dtype, monkeypatch):
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver, dtype=dtype)
    published = receiver.publish(1, decoder(seed=1), getattr(torch, dtype))
    assert await under_test.update(published) == published.version
    prove = Staging.prove

    def late(self: Staging, serving: Any, version: Version) -> Any:
        serving.decoder.norm.weight[3] += 1
        return prove(self, serving, version)

    monkeypatch.setattr(Staging, "prove", late)
    try:
        with pytest.raises(PolicyMismatch, match=r"other weights are served: model\.norm\.weight differs"):
            await under_test.update(receiver.publish(2, decoder(seed=2), getattr(torch, dtype)))
        with pytest.raises(EngineFailed, match="other weights"):
            await under_test.generate(GenerateRequest(prompts(1)[0], SamplingParams()))
    finally:
        await under_test.close()


async def test_what_an_update_committed_is_verified_also_when_it_is_cancelled(monkeypatch):
    """As when the trainer that asked for it is lost: the engine goes on with these weights."""
    receiver = MemoryReceiver()
    under_test = engine(receiver=receiver)
    prove = Staging.prove

    def changed_and_left(self: Staging, serving: Any, version: Version) -> Any:
        updating.cancel()
        yield
        serving.decoder.norm.weight[3] += 1
        return (yield from prove(self, serving, version))

    monkeypatch.setattr(Staging, "prove", changed_and_left)
    for name in ("TURN_S", "SHARE"):
        monkeypatch.setattr(weight_updates, name, 0.0)  # one piece in each turn
    updating = asyncio.ensure_future(under_test.update(receiver.publish(1, decoder(seed=1))))
    try:
        with pytest.raises(PolicyMismatch, match="other weights are served"):
            await updating
        with pytest.raises(EngineFailed, match="other weights"):
            await under_test.generate(GenerateRequest(prompts(1)[0], SamplingParams()))
    finally:
        await under_test.close()


def test_the_head_of_other_weights_is_noticed_in_low_precision_too():
    receiver, model = MemoryReceiver(), decoder(dtype=torch.bfloat16)
    published = receiver.publish(1, decoder(seed=1), torch.bfloat16)
    old = serve(model, Version(0), pack=True)
    under_test = Staging(receiver, old, pack=True)
    staged = at_once(under_test.stage(published, old))
    at_once(under_test.prove(staged, published.version))
    staged.head = old.head
    with pytest.raises(PolicyMismatch, match="the head that is served is another one"):
        at_once(under_test.prove(staged, published.version))


def test_decoding_with_other_weights_is_noticed():
    receiver, model = MemoryReceiver(), decoder()
    published = receiver.publish(1, decoder(seed=1))
    old = serve(model, Version(0), pack=True)
    under_test = Staging(receiver, old, pack=True)
    staged = at_once(under_test.stage(published, old))
    if staged.decoding is None:
        pytest.skip("nothing is packed on this processor")
    at_once(under_test.prove(staged, published.version))
    for other in (old.decoding, None):
        with pytest.raises(PolicyMismatch, match="decoding steps compute with other weights"):
            at_once(under_test.prove(replace(staged, decoding=other), published.version))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["layers.1.qkv", "layers.0.down", "head"])
def test_a_packed_copy_that_is_not_its_weights_is_noticed(dtype, name):
    receiver, model = MemoryReceiver(), decoder(dtype=dtype)
    published = receiver.publish(1, decoder(seed=1), dtype)
    serving = serve(model, Version(0), pack=True)
    under_test = Staging(receiver, serving, pack=True)
    staged = at_once(under_test.stage(published, serving))
    packed = {name: packed for name, _, packed in staged.decoder.packed()}[name]
    names = {"layers.1.qkv": "model.layers.1.self_attn.q_proj.weight, ", "layers.0.down": "model.layers.0.mlp.down_proj"}
    what = names.get(name, "(the head, |lm_head)")
    if packed.numbers is None:
        pytest.skip("nothing is packed on this processor")
    at_once(under_test.prove(staged, published.version))
    stale = packed.numbers.clone()
    packed.numbers[77] = -packed.numbers[77]
    with pytest.raises(PolicyMismatch, match=f"other weights are served: {what}"):
        at_once(under_test.prove(staged, published.version))
    packed.numbers.copy_(stale)
    at_once(under_test.prove(staged, published.version))


def test_names_that_do_not_cover_every_weight_are_refused(monkeypatch):
    from tidemill.models import served_weights

    views = served_weights.hf_views
    monkeypatch.setattr(
        served_weights, "hf_views", lambda d: ((n, v) for n, v in views(d) if not n.endswith("k_proj.weight"))
    )
    with pytest.raises(PolicyMismatch, match=r"cover \d+ of \d+ weights"):
        Contents.of(decoder(), torch.float32)


def test_words_and_totals_tell_tensors_apart():
    one, other = Contents.of(decoder(), torch.float32), Contents.of(decoder(seed=1), torch.float32)
    assert one == Contents.of(decoder(), torch.float32) and one.words == words_of(hf_blocks(decoder()))
    random = [name for name in one.words if "norm" not in name]
    assert random and all(one.words[name] != other.words[name] and one.totals[name] != other.totals[name] for name in random)
    assert Contents.of(decoder(), torch.bfloat16).fingerprint != one.fingerprint
