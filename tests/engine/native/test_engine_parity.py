"""The engine's tokens and logprobs against a plain full forward of the same decoder, through every path there is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from engine_cases import (
    BASE,
    FAMILIES,
    decoder,
    engine,
    kept,
    log_softmax,
    prompts,
    reference,
    reference_logprobs,
    with_pages,
)

from tidemill.core.types import Finish, GenerateRequest, SamplingParams
from tidemill.engine.native.paged_attention import PagedCache, _group, siblings_together
from tidemill.engine.native.step_plan import Chunk
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.library import native

PATHS = {
    "plain": {"prefix_cache": False},
    "chunked": {"prefix_cache": False, "prefill_chunk": 3},
    "cached": {"prefix_cache": True},
    "cached and chunked": {"prefix_cache": True, "prefill_chunk": 5, "page_size": 2},
    "one at a time": {"max_sequences": 1},
    "preempted": {"prefix_cache": True, "max_sequences": 6},
    "preempted without a cache": {"prefix_cache": False, "max_sequences": 6, "prefill_chunk": 7},
}


async def run(under_test, texts, params):
    keys = [f"k{i}" for i in range(len(texts))]
    return await asyncio.gather(
        *(
            under_test.generate(GenerateRequest(t, p, key=k, extras=("model_logprobs",)))
            for t, p, k in zip(texts, params, keys, strict=True)
        )
    )


def siblings() -> list[np.ndarray]:
    """Prompts that share prefixes in every way: twins, aligned to pages and not, longer and shorter ones."""
    first, second = prompts(2, 16, 17, seed=5)
    return [first, first, first[:13], first[:12], first[:13], np.concatenate([first[:8], second]), second, *prompts(4)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_equal_a_full_forward(family, path, monkeypatch):
    arch = FAMILIES[family]
    if path.startswith("preempted"):
        with_pages(monkeypatch, 26)
    under_test = engine(arch, **PATHS[path])
    texts = siblings()
    params = [SamplingParams(max_tokens=20, seed=i) for i in range(len(texts))]
    completions = await run(under_test, texts, params)
    model = decoder(arch)
    for text, completion in zip(texts, completions, strict=True):
        expected = reference_logprobs(model, text, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
        np.testing.assert_array_equal(completion.logprobs, completion.extras["model_logprobs"])
        assert len(completion.tokens) == 20 and completion.finish is Finish.LENGTH
        assert completion.support is None and completion.prompt_tokens == len(text)
    stats = await under_test.stats()
    assert (stats.preemptions > 0) == path.startswith("preempted")
    assert (stats.cached_tokens > 0) == (path not in ("plain", "chunked", "preempted without a cache"))
    assert stats.generated == 20 * len(texts) and stats.running == stats.waiting == 0
    await under_test.close()


@pytest.mark.skipif(native() is None, reason="no C compiler")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("path", ["plain", "chunked", "cached", "preempted"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_compiled_steps_equal_a_full_forward(family, path, whole, monkeypatch):
    """Attention alone, and all layers at once where every row decodes."""
    arch = replace(FAMILIES[family], head_dim=16)
    if path == "preempted":
        with_pages(monkeypatch, 10)
    under_test = engine(arch, **{**PATHS[path], "page_size": 16})
    assert under_test._cache is not None and under_test._cache._native is not None
    if whole and under_test._updates.weights.decoding is None:
        pytest.skip("nothing is packed on this processor")
    if not whole:
        under_test._updates.weights.decoding = None
    texts = siblings()
    params = [SamplingParams(max_tokens=20, seed=i) for i in range(len(texts))]
    completions = await run(under_test, texts, params)
    for text, completion in zip(texts, completions, strict=True):
        np.testing.assert_allclose(
            completion.logprobs, reference_logprobs(decoder(arch), text, completion.tokens), atol=2e-5
        )
    stats = await under_test.stats()
    assert (stats.preemptions > 0) == (path == "preempted")
    await under_test.close()


@pytest.mark.skipif(native() is None, reason="no C compiler")
@pytest.mark.parametrize("path", ["plain", "chunked"])
async def test_prompts_are_attended_to_where_they_lie(path, monkeypatch):
    """What begins a sequence among the step's keys and values; what goes on, as rows of the kernel that reads pages."""
    among, pages = [], []
    see, attend = Native.see, Native.attend

    def watch(self, q, k, v, families, window):
        among.append(len(families.places))
        return see(self, q, k, v, families, window)

    def watch_pages(self, kv, q, *given):
        pages.append(len(q))
        return attend(self, kv, q, *given)

    monkeypatch.setattr(Native, "see", watch)
    monkeypatch.setattr(Native, "attend", watch_pages)
    monkeypatch.setattr(PagedCache, "attend_chunks", lambda *_: pytest.fail("pages were gathered"))
    arch, texts = replace(BASE, head_dim=16), prompts(5, 9, 17)
    under_test = engine(arch, **PATHS[path], page_size=16)
    under_test._updates.weights.decoding = None  # else rows that decode see their pages in another call
    completions = await run(under_test, texts, [SamplingParams(max_tokens=3, seed=i) for i in range(len(texts))])
    tokens = sum(map(len, texts))
    assert sum(among) + sum(pages) == arch.layers * (tokens + 2 * len(texts)), "each token once: the last has no successor"
    assert sum(among) == arch.layers * tokens if path == "plain" else 0 < sum(among) < arch.layers * tokens
    for text, completion in zip(texts, completions, strict=True):
        np.testing.assert_allclose(
            completion.logprobs, reference_logprobs(decoder(arch), text, completion.tokens), atol=2e-5
        )
    await under_test.close()


@pytest.mark.parametrize("most", [40, 130, 600])
def test_chunks_are_gathered_a_block_at_a_time(most):
    rng = np.random.default_rng(most)
    pieces = [Chunk(i, int(rng.integers(40, 52)), 8, 0) for i in range(60)]
    groups = _group(pieces, most)
    assert sorted(p.slot for group in groups for p in group) == list(range(60))
    seen = [len(group) * max(p.start + p.count for p in group) for group in groups]
    assert all(keys <= most or len(group) == 1 for keys, group in zip(seen, groups, strict=True))
    assert max(seen) > 0.8 * most, "they are together where they may be"


@pytest.mark.parametrize("texts", [[[5, 9, 31]] * 3, [[5, 9, 31], [7], [5, 9, 31], [7]]])
async def test_as_many_that_sample_as_tokens_that_are_computed(texts):
    under_test = engine()
    given = [np.array(text) for text in texts]
    completions = await run(under_test, given, [SamplingParams(max_tokens=4, seed=i) for i in range(len(given))])
    distinct = {tuple(text) for text in texts}
    assert (await under_test.stats()).cached_tokens == sum(map(len, texts)) - sum(map(len, distinct))
    for text, completion in zip(given, completions, strict=True):
        np.testing.assert_allclose(completion.logprobs, reference_logprobs(decoder(), text, completion.tokens), atol=2e-5)
    await under_test.close()


def test_rows_with_the_same_first_page_are_taken_together():
    assert siblings_together(np.array([5, 2, 5, 9, 2, 5])).tolist() == [0, 2, 5, 1, 4, 3]
    assert siblings_together(np.zeros(0, np.int32)).tolist() == []


@pytest.mark.skipif(native() is None, reason="no C compiler")
async def test_the_engine_tells_the_kernel_who_shares(monkeypatch):
    """Prompts that come in turns, so that neighbours in the plan share nothing."""
    under_test = engine(replace(BASE, head_dim=16), page_size=16, max_sequences=12)
    kernels = native()
    assert kernels is not None and under_test._cache is not None and under_test._cache._native is kernels
    given, attend = [], kernels.attend

    def watch(pages, q, table, slots, lows, ends, order, threads):
        given.append(table[slots[order], 0].tolist())
        return attend(pages, q, table, slots, lows, ends, order, threads)

    monkeypatch.setattr(kernels, "attend", watch)
    under_test._updates.weights.decoding = None
    texts = prompts(3, 20, 30) * 4
    await run(under_test, texts, [SamplingParams(max_tokens=5, seed=i) for i in range(12)])
    assert all(len(list(groupby(first))) == len(set(first)) for first in given)
    assert any(len(first) == 12 and len(set(first)) == 3 for first in given)
    await under_test.close()


async def test_noise_does_not_depend_on_company(monkeypatch):
    texts = prompts(32)
    params = [SamplingParams(max_tokens=12, seed=1000 + i) for i in range(32)]
    alone = engine()
    expected = [(await alone.generate(GenerateRequest(t, p))).tokens for t, p in zip(texts, params, strict=True)]
    await alone.close()
    together = engine(max_sequences=32)
    with_pages(monkeypatch, 40)
    cramped = engine(max_sequences=32, prefill_chunk=10)
    for under_test, order in ((together, range(32)), (together, range(31, -1, -1)), (cramped, range(0, 32))):
        got = await run(under_test, [texts[i] for i in order], [params[i] for i in order])
        for i, completion in zip(order, got, strict=True):
            np.testing.assert_array_equal(completion.tokens, expected[i])
    assert (await cramped.stats()).preemptions > 0
    other = await run(together, texts, [SamplingParams(max_tokens=12, seed=5000 + i) for i in range(32)])
    assert any((c.tokens != e).any() for c, e in zip(other, expected, strict=True))
    await together.close()
    await cramped.close()


async def test_mixed_sampling_against_numpy():
    asked = [
        SamplingParams(temperature=0.7, max_tokens=12, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8, max_tokens=12, seed=2),
        SamplingParams(temperature=1.3, top_k=5, max_tokens=12, seed=3),
        SamplingParams(min_p=0.1, max_tokens=12, seed=4),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.7, min_p=0.05, max_tokens=12, seed=5),
        SamplingParams(temperature=0, max_tokens=12, top_logprobs=3),
        SamplingParams(max_tokens=12, seed=6, top_logprobs=5),
    ]
    texts = prompts(len(asked))
    under_test = engine()
    model = decoder()
    for text, params, completion in zip(texts, asked, await run(under_test, texts, asked), strict=True):
        whole = np.concatenate([text, completion.tokens])
        logits = reference(model, whole[:-1])[len(text) - 1 :]
        unmodified = reference_logprobs(model, text, completion.tokens)
        np.testing.assert_allclose(completion.extras["model_logprobs"], unmodified, atol=2e-5)
        if params.temperature == 0:
            np.testing.assert_array_equal(completion.tokens, logits.argmax(-1))
            assert not completion.logprobs.any() and completion.support is None
            np.testing.assert_allclose(completion.top_logprobs[:, 0], unmodified, atol=2e-5)
            np.testing.assert_array_equal(completion.top_ids, np.argsort(-logits, -1, kind="stable")[:, :3])
            continue
        expected = np.stack([kept(row, params) for row in logits])
        np.testing.assert_allclose(completion.logprobs, expected[np.arange(12), completion.tokens], atol=2e-5)
        truncated = params.top_p < 1 or params.top_k or params.min_p
        assert (completion.support is not None) == bool(truncated)
        if truncated:
            rows = np.split(completion.support.ids, completion.support.offsets[1:-1])
            assert [set(r.tolist()) for r in rows] == [set(np.flatnonzero(np.isfinite(e)).tolist()) for e in expected]
        assert (completion.top_ids is not None) == (params.top_logprobs > 0)
    await under_test.close()


@pytest.mark.parametrize("chunk", [5, 2048])
async def test_score(chunk):
    arch = FAMILIES["qwen3"]
    under_test = engine(arch, prefill_chunk=chunk)
    model = decoder(arch)
    busy = asyncio.gather(*(under_test.generate(GenerateRequest(t, SamplingParams(max_tokens=30))) for t in prompts(4)))
    texts = [*prompts(6, 2, 90, seed=9), *prompts(2, 17, 18)]
    for text, got in zip(texts, await asyncio.gather(*(under_test.score(t, "policy", 0.8, 3) for t in texts)), strict=True):
        rows = log_softmax(reference(model, text)[:-1] / 0.8)
        np.testing.assert_allclose(got.logprobs[1:], rows[np.arange(len(text) - 1), text[1:]], atol=2e-5)
        np.testing.assert_array_equal(got.top_ids[1:], np.argsort(-rows, -1, kind="stable")[:, :3])
        assert got.logprobs[0] == 0 and (got.top_ids[0] == -1).all() and got.version.step == 0
    single = await under_test.score(np.array([3], np.int32), "policy", 1.0, 0)
    assert single.logprobs.tolist() == [0.0] and single.top_ids is None
    await busy
    before = (await under_test.stats()).cached_tokens
    await under_test.generate(GenerateRequest(texts[0], SamplingParams(max_tokens=2)))
    assert (await under_test.stats()).cached_tokens == before, "a score must not feed the prefix cache"
    await under_test.close()


async def test_next_turn_finds_its_history():
    under_test = engine()
    text = prompts(1, 20, 21)[0]
    first = await under_test.generate(GenerateRequest(text, SamplingParams(max_tokens=14, seed=3), key="episode"))
    history = np.concatenate([text, first.tokens, prompts(1, 5, 6)[0]])
    second = await under_test.generate(GenerateRequest(history, SamplingParams(max_tokens=10, seed=4), key="episode"))
    assert second.cached_tokens == (20 + 14 - 1) // 4 * 4  # all but the last token were computed, in full pages
    np.testing.assert_allclose(second.logprobs, reference_logprobs(decoder(), history, second.tokens), atol=2e-5)
    await under_test.close()


async def test_bfloat16_stays_close_to_its_own_full_forward():
    arch = FAMILIES["qwen3"]
    under_test = engine(arch, dtype="bfloat16")
    texts = prompts(8)
    model = decoder(arch, dtype=torch.bfloat16)
    params = [SamplingParams(max_tokens=20, seed=i) for i in range(8)]
    for text, completion in zip(texts, await run(under_test, texts, params), strict=True):
        gap = np.abs(completion.logprobs - reference_logprobs(model, text, completion.tokens))
        assert gap.mean() < 0.05  # bfloat16 has eight bits; weights are large here
    await under_test.close()


def test_context_is_the_page_budget_when_that_is_smaller(monkeypatch):
    with_pages(monkeypatch, 5)
    assert engine(BASE)._scheduler.context == 20
