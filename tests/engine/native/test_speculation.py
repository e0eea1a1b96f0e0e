"""Speculation: tokens, logprobs, versions and KV are those without drafts, whatever happens to a draft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BASE, FAMILIES, VOCAB, MemoryReceiver, decoder, engine, reference_logprobs

import tidemill.engine.native.native_engine as core
from tidemill.controller.sampling_check import compare_sampling
from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.decoder import Decoder
from tidemill.models.kernels.cpu.decode_pass import parts_of
from tidemill.observability.diagnosis.mismatch import GROSS
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings

PERIOD = 7
ARCH = replace(BASE, context=128)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_p": 0.8},
    {"top_k": 7, "temperature": 0.7},
    {"min_p": 0.05, "top_logprobs": 3},
    {"repetition_penalty": 1.1, "temperature": 0.5},
    {"frequency_penalty": 0.05, "logit_bias": ((3, 1.0), (4, 0.5)), "min_tokens": 9},
)


def habitual(seed: int = 0, arch=ARCH, strength: float = 2.0) -> Decoder:
    """A model with habits: mostly, the next token is the last one's successor in its loop of PERIOD tokens."""
    model = decoder(arch, seed)
    assert model.head is not None
    before = np.arange(VOCAB)
    whole = VOCAB // PERIOD * PERIOD
    before[:whole] = before[:whole] // PERIOD * PERIOD + (before[:whole] - 1) % PERIOD
    with torch.no_grad():
        model.head.weight.copy_(0.3 * model.head.weight + strength * model.embed.weight[torch.from_numpy(before)])
        model.embed.weight.mul_(5)  # beside it, what the layers add is small
    return model


@asynccontextmanager
async def serving(
    method: str = "rollouts", seed: int = 0, arch=ARCH, receiver=None, **settings
) -> AsyncIterator[NativeEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_cases.decoder", lambda *_: habitual(0, arch))
        made = engine(arch, receiver=receiver, speculation={"method": method}, **{"max_sequences": 16, **settings})
    try:
        yield made
        made._scheduler.check_integrity()
    finally:
        await made.close()


async def counters(of: NativeEngine) -> dict[str, float]:
    return (await of.telemetry()).counters


def requests(count: int, seed: int = 0) -> list[GenerateRequest]:
    """Prompts of many lengths, in groups with one prompt; some repeat themselves, some begin alike."""
    rng = np.random.default_rng(seed)
    common, asked = rng.integers(0, VOCAB, 12), list[GenerateRequest]()
    while len(asked) < count:
        number = len(asked)
        text = rng.integers(0, VOCAB, rng.integers(1, 30))
        if number % 3 == 0:
            text = np.resize(text[:5], rng.integers(5, 40))
        elif number % 3 == 1:
            text = np.concatenate([common, text])
        kind = KINDS[number // 3 % len(KINDS)]
        for sample in range(int(rng.integers(1, 4))):
            stops = (int(rng.integers(VOCAB)),) if sample == 1 else ()
            params = SamplingParams(max_tokens=int(rng.integers(1, 60)), seed=1000 * seed + number, stop_ids=stops, **kind)
            number += 1
            asked.append(GenerateRequest(text.astype(np.int32), params, extras=("model_logprobs",)))
    return asked[:count]


async def in_turns(of: NativeEngine, asked: list[GenerateRequest], at_once: int = 3) -> list[Completion]:
    """A few at a time, as in the tail of a batch."""
    found = list[Completion]()
    for begin in range(0, len(asked), at_once):
        found += await asyncio.gather(*map(of.generate, asked[begin : begin + at_once]))
    return found


def same(a: Completion, b: Completion, nats: float) -> bool:
    """True when two completions are equal, their logprobs to `nats`, and to the bit at 0."""
    supports = (a.support, b.support)
    if a.support is not None and b.support is not None:
        supports = tuple((s.ids.tolist(), s.offsets.tolist()) for s in (a.support, b.support))
    pairs = [(a.logprobs, b.logprobs), (a.extras["model_logprobs"], b.extras["model_logprobs"])]
    return (
        a.tokens.tolist() == b.tokens.tolist()
        and (a.finish, a.versions.tolist(), a.sources) == (b.finish, b.versions.tolist(), b.sources)
        and supports[0] == supports[1]
        and all(np.abs(x - y).max(initial=0.0) <= nats for x, y in pairs)
        and ((a.top_ids is None) == (b.top_ids is None))
        and (a.top_ids is None or b.top_ids is None or a.top_ids.tolist() == b.top_ids.tolist())
    )


async def compare(
    asked: list[GenerateRequest], nats: float, least: float, methods: tuple[str, ...] = ("rollouts",), **settings
) -> dict[str, float]:
    """Sample with and without drafts. least: the share of tokens that must have come from drafts."""
    async with serving("none", **settings) as plain:
        expected = await in_turns(plain, asked)
        assert (await counters(plain))["drafted_tokens"] == 0
    counts = dict[str, float]()
    for method in methods:
        async with serving(method, **settings) as drafting:
            found = await in_turns(drafting, asked)
            counts = await counters(drafting)
        different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same(a, b, nats)]
        assert not different, f"{method}: {len(different)} of {len(asked)} differ, the first is {different[0]}"
        assert counts["generated_tokens"] == sum(len(each.tokens) for each in expected)
        assert counts["accepted_tokens"] >= least * counts["generated_tokens"], counts
        assert counts["drafted_tokens"] > 1.05 * counts["accepted_tokens"], "some guesses were wrong"
    return counts


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "chunked": {"prefill_chunk": 5},
    "no prefix cache": {"prefix_cache": False, "page_size": 3},
    "pages of one token": {"page_size": 1},
    "compiled": {"page_size": 16, "arch": replace(ARCH, head_dim=16)},
}


@pytest.mark.parametrize("way", [way if way == "chunked" else pytest.param(way, marks=pytest.mark.runs) for way in WAYS])
async def test_tokens_are_those_without(way: str) -> None:
    await compare(requests(60 if way == "one by one" else 24), 1e-4, 0.15, ("ngram", "rollouts"), **WAYS[way])


async def test_two_threads_never_share_a_draft() -> None:
    """A thread would read keys that the other one has yet to write."""
    assert parts_of(np.array([5, 5, 5, 5, 5, 2, 2, 7]), 2).tolist() == [0, 5, 8]
    assert parts_of(np.array([5, 2, 2, 2, 2, 2]), 3).tolist() == [0, 6, 6, 6]
    assert parts_of(np.arange(9), 2).tolist() == [0, 4, 9] and parts_of(np.arange(1), 2).tolist() == [0, 0, 1]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        await compare(requests(15, seed=8), 1e-4, 0.05, **WAYS["compiled"])
    finally:
        torch.set_num_threads(before)


async def test_in_the_batch_invariant_mode_all_bits_are_those_without() -> None:
    await compare(requests(24, seed=1), 0.0, 0.15, batch_invariant=True)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
async def test_sliding_windows(family: str) -> None:
    await compare(requests(24, seed=2), 1e-4, 0.1, arch=replace(FAMILIES[family], context=128))


@pytest.mark.slow
@pytest.mark.parametrize(("invariant", "nats"), [(False, 1e-4), (True, 0.0)])
async def test_a_thousand_prompts(invariant: bool, nats: float) -> None:
    counts = await compare(requests(1000, seed=3), nats, 0.2, batch_invariant=invariant)
    assert counts["accepted_tokens"] > 5000


async def test_with_little_memory_sequences_are_preempted_and_go_on(monkeypatch) -> None:
    asked = requests(40, seed=4)
    async with serving("none") as plain:
        expected = await in_turns(plain, asked, at_once=4)
    monkeypatch.setattr(core, "pages_of", lambda *_: 29)
    async with serving("rollouts", page_size=4) as drafting:
        found = await in_turns(drafting, asked, at_once=4)
        counts = await counters(drafting)
    assert all(same(a, b, 1e-4) for a, b in zip(expected, found, strict=True))
    assert counts["preemptions"] > 0 and counts["accepted_tokens"] > 100


async def test_drafts_only_fill_steps_of_few_tokens() -> None:
    """Beside five live sequences 16 tokens leave too little room, beside four each has three."""
    prompt = np.resize(np.arange(PERIOD), 30).astype(np.int32)
    sizes = list[tuple[int, int]]()
    async with serving("ngram", max_sequences=16) as drafting:
        plan = drafting._scheduler.plan

        def watched(drafts=None):
            made = plan(drafts)
            if made is not None and drafts:
                sizes.append((len(drafting._scheduler.running), len(made.tokens)))
            return made

        drafting._scheduler.plan = watched  # type: ignore[method-assign]
        params = [SamplingParams(max_tokens=8 + 4 * max(0, 3 - i), seed=i, temperature=0.2) for i in range(9)]
        await asyncio.gather(*(drafting.generate(GenerateRequest(prompt, each)) for each in params))
    assert sizes and max(rows for rows, _ in sizes) <= 4 and max(tokens for _, tokens in sizes) <= 16
    assert any(tokens > 2 * rows for rows, tokens in sizes)


async def test_what_stops_a_reply_ends_it_inside_of_a_draft() -> None:
    """An earlier reply goes on after the token that ends the next one."""
    prompt = np.array([0, 1, 2], np.int32)
    params = SamplingParams(max_tokens=40, seed=3, temperature=0.0)
    async with serving("rollouts") as drafting:
        whole = (await drafting.generate(GenerateRequest(prompt, params))).tokens
        before, sampled = await counters(drafting), len(whole)
        for number in (5, 9, 14):
            stop = int(whole[number])
            first = int(np.flatnonzero(whole == stop)[0])
            ended = await drafting.generate(GenerateRequest(prompt, replace(params, stop_ids=(stop,))))
            assert ended.finish is Finish.STOP and ended.tokens.tolist() == whole[: first + 1].tolist()
            sampled += first + 1
        assert (await counters(drafting))["generated_tokens"] == sampled, "nothing was sampled beyond an end"
        for most in range(1, 12):
            short = await drafting.generate(GenerateRequest(prompt, replace(params, max_tokens=most)))
            assert short.finish is Finish.LENGTH and short.tokens.tolist() == whole[:most].tolist()
        assert (await counters(drafting))["accepted_tokens"] > before["accepted_tokens"] + 30


async def test_rejected_tokens_never_get_into_the_prefix_cache() -> None:
    """Whatever is findable there is a beginning of something that was asked or sampled, and its KV is right."""
    asked, known = requests(30, seed=5), set[bytes]()
    async with serving("rollouts", page_size=2, max_sequences=32) as drafting:
        done = await in_turns(drafting, asked)
        assert (await counters(drafting))["drafted_tokens"] > 50 + (await counters(drafting))["accepted_tokens"]
        for request, reply in zip(asked, done, strict=True):
            whole = np.concatenate([request.tokens, reply.tokens]).astype(np.int32)
            known |= {whole[at : at + 2].tobytes() for at in range(0, len(whole) - 1, 2)}
        assert {key.tokens for key in drafting._scheduler.blocks._by_key} <= known
        for request, reply in zip(asked, done, strict=True):
            turn = np.concatenate([request.tokens, reply.tokens, [1, 2]]).astype(np.int32)
            again = await drafting.generate(GenerateRequest(turn, SamplingParams(max_tokens=6, seed=9)))
            assert again.cached_tokens >= (len(turn) - 3) // 2 * 2, "the reply's own pages are found"
            expected = reference_logprobs(habitual(), turn, again.tokens)
            assert np.abs(again.logprobs - expected).max() < 1e-4


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish"])
async def test_a_version_is_committed_between_two_steps_with_drafts(mode: str) -> None:
    """Each token's logprob is that of the version that it names."""
    receiver = MemoryReceiver()
    models = {step: habitual(step, strength=2.0 + step / 10) for step in range(3)}
    asked = requests(6, seed=6)[:3]
    asked = [replace(r, params=SamplingParams(max_tokens=90, seed=i, temperature=0.5)) for i, r in enumerate(asked)]
    asked = [replace(r, tokens=r.tokens[:20]) for r in asked]
    async with serving("rollouts", receiver=receiver, in_flight=mode) as drafting:
        replies = [asyncio.ensure_future(drafting.generate(each)) for each in asked]
        for step in (1, 2):
            while (await drafting.stats()).generated < 60 * step:
                await asyncio.sleep(0)
            await drafting.update(receiver.publish(step, models[step]))
        done = await asyncio.gather(*replies)
        counts = await counters(drafting)
    assert counts["accepted_tokens"] > 30
    spans = [sorted(set(each.versions.tolist())) for each in done]
    assert all(len(span) == 1 for span in spans) if mode == "finish" else any(len(span) > 1 for span in spans)
    for request, reply in zip(asked, done, strict=True):
        assert (np.diff(reply.versions) >= 0).all()
        for version in set(reply.versions.tolist()) if mode != "keep" else {int(reply.versions[0])}:
            expected = reference_logprobs(models[version], request.tokens, reply.tokens, 0.5)
            mine = reply.versions == version
            assert np.abs(reply.logprobs - expected)[mine].max() < 1e-4


async def test_an_abort_returns_what_counts_and_nothing_of_a_draft() -> None:
    request = GenerateRequest(
        np.array([7, 8, 9], np.int32), SamplingParams(max_tokens=100, seed=1, temperature=0.3), key="a"
    )
    async with serving("rollouts") as drafting:
        whole = await drafting.generate(replace(request, key=""))
        for least in (3, 10, 31, 60):
            before = (await drafting.stats()).generated
            reply = asyncio.ensure_future(drafting.generate(request))
            while (await drafting.stats()).generated < before + least:
                await asyncio.sleep(0)
            await drafting.abort("a")
            cut = await reply
            assert cut.finish is Finish.CANCELLED and least <= len(cut.tokens) < 100
            assert cut.tokens.tolist() == whole.tokens[: len(cut.tokens)].tolist()
        assert (await counters(drafting))["accepted_tokens"] > 50


async def test_a_stream_brings_each_token_once_and_in_order() -> None:
    request = GenerateRequest(np.array([7, 8, 9], np.int32), SamplingParams(max_tokens=80, seed=1, temperature=0.3, top_k=5))
    async with serving("rollouts") as drafting:
        whole = await drafting.generate(request)
        stream = drafting.stream(request)
        tokens = [token async for token in stream]
        assert stream.completion is not None and same_support(stream.completion, whole)
        assert [token for token, *_ in tokens] == whole.tokens.tolist()
        assert np.allclose([logprob for _, logprob, *_ in tokens], whole.logprobs, atol=1e-5)


def same_support(a: Completion, b: Completion) -> bool:
    assert a.support is not None and b.support is not None
    return a.support.ids.tolist() == b.support.ids.tolist() and a.support.offsets.tolist() == b.support.offsets.tolist()


async def test_the_sampling_check_of_runs_finds_nothing() -> None:
    """Replies with drafts are samples of the model, with its logprobs."""
    trainer = NativeTrainer(habitual(), TrainerSettings(device="cpu"), steps=1)
    async with serving("rollouts", max_sequences=16) as drafting:
        report = await compare_sampling(drafting.generate, trainer.forward, SamplingParams(), VOCAB, "policy", context=64)
        assert (await counters(drafting))["accepted_tokens"] > 200
    await trainer.close()
    assert report.fault(GROSS["float32"]) == "" and report.freedom > 20 and report.gap.metrics()["logprob_gap"] < 1e-5
