"""The compiled pass over rows that decode: the bits of the decoder's own operations, the same keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BASE, FAMILIES, decoder, engine, prompts, reference_logprobs

from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.engine.native.paged_attention import PagedCache, siblings_together
from tidemill.engine.native.staged_weights import serve
from tidemill.engine.native.step_plan import Chunk, Plan
from tidemill.models.architecture import Architecture
from tidemill.models.kernels.cpu import thread_thresholds
from tidemill.models.kernels.cpu.bindings import NONE
from tidemill.models.kernels.cpu.decode_pass import DecodingRows
from tidemill.models.kernels.library import native

ROWS, PAGES = 26, 90
BIASES = replace(BASE, qkv_bias=True, o_bias=True, mlp_bias=True, heads=2, kv_heads=2, head_dim=32)
SHAPES = {name: replace(arch, head_dim=16) for name, arch in FAMILIES.items()} | {"every bias": BIASES}
SHAPES = {name: replace(arch, intermediate=96, hidden=64) for name, arch in SHAPES.items()}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if (compiled := native()) is None or compiled.products[request.param] == NONE:
        pytest.skip("no packed products on this processor")
    return request.param


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def a_step(vocab: int, seed: int = 0) -> tuple[Plan, np.ndarray]:
    """Rows of 1 to 40 tokens in pages of 16, in families that share their first page or two; one writes nowhere."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 41, ROWS))[::-1].copy()
    table, free = np.zeros((ROWS, 4), np.int32), iter(range(1, PAGES))
    first = [next(free), next(free)]
    for row, length in enumerate(lengths):
        own = -(-length // 16)
        common = min(own - 1, row % 3) if row % 2 else 0  # families stand apart in the plan
        table[row, :own] = [*first[:common], *(next(free) for _ in range(own - common))]
    singles = np.arange(ROWS)
    positions = lengths - 1
    writes = table[singles, positions // 16].astype(np.int64) * 16 + positions % 16
    writes[-1] = positions[-1] % 16  # its key is there already: what it writes is discarded
    tokens = rng.integers(0, vocab, ROWS)
    none = np.empty((0, 2), np.int64)
    return Plan(singles, lengths, [], tokens, positions, writes, singles, singles, lengths, singles, none, [], []), table


def filled(arch: Architecture, dtype: torch.dtype) -> PagedCache:
    cache = PagedCache(arch, PAGES, 16, dtype, torch.device("cpu"))
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def both(arch: Architecture, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states, and all keys and values afterwards: of the pass, and of the operations one by one."""
    model, generator = decoder(arch, dtype=dtype).requires_grad_(False), torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases, which are all alike at first
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    weights, (plan, table) = serve(model, Version(0), pack=True), a_step(arch.vocab)
    assert weights.decoding is not None
    order = siblings_together(table[plan.singles, 0])
    assert order.tolist() != list(range(ROWS))
    found = []
    for of in (weights, replace(weights, decoding=None)):
        cache = filled(arch, dtype)
        with torch.inference_mode():
            found.append([cache.hidden(of, plan, table, np.arange(len(plan.tokens))), cache.kv])
    return found[0], found[1]


@pytest.mark.parametrize("family", SHAPES)
def test_the_same_bits_on_one_thread(family: str, dtype: torch.dtype) -> None:
    passed, single = both(SHAPES[family], dtype)
    assert all(map(torch.equal, passed, single))


@pytest.mark.parametrize("family", SHAPES)
def test_threads_take_rows(family: str, dtype: torch.dtype, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows share an attention differs, and with it the order of sums."""
    passed, single = both(SHAPES[family], dtype)
    error = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(passed, single, strict=True):
        torch.testing.assert_close(one, other, atol=error, rtol=error)
    assert torch.isfinite(passed[0]).all()


@pytest.mark.parametrize("rows, small, passes", [(ROWS // 2, False, 1), (ROWS // 2 + 1, False, 0), (ROWS, True, 1)])
def test_few_rows_of_large_layers_are_shared_out_by_products(
    rows: int, small: bool, passes: int, dtype: torch.dtype, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer than so many a thread, each thread reads a part of every matrix instead."""
    monkeypatch.setattr(thread_thresholds, "PASS_ROWS", rows)
    layers = serve(decoder(SHAPES["llama"], dtype=dtype), Version(0), pack=True).decoding
    assert layers is not None and layers.largest >= dtype.itemsize * 64 * (3 * 96 + 16 * (2 * 4 + 2 * 2))
    monkeypatch.setattr(thread_thresholds, "LAYER_BYTES", layers.largest - (not small))
    compiled, calls = native(), []
    assert compiled is not None
    decode = compiled.decode
    monkeypatch.setattr(compiled, "decode", lambda *given: calls.append(given) or decode(*given))
    both(SHAPES["llama"], dtype)
    assert len(calls) == passes


def test_matrices_that_are_not_packed_are_left_to_the_operations(dtype: torch.dtype) -> None:
    assert serve(decoder(SHAPES["qwen3"], dtype=dtype), Version(0), pack=False).decoding is None


async def test_an_engine_decodes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, steps = native(), []
    if compiled is None or compiled.products[torch.float32] == NONE:
        pytest.skip("no packed products on this processor")
    decode = compiled.decode

    def watch(weights: Any, rows: DecodingRows, threads: int) -> torch.Tensor:
        steps.append(len(rows.tokens))
        return decode(weights, rows, threads)

    monkeypatch.setattr(compiled, "decode", watch)
    arch = replace(BASE, head_dim=16)
    under_test, text = engine(arch, page_size=16), prompts(1, 20, 21)[0]
    completion = await under_test.generate(GenerateRequest(text, SamplingParams(max_tokens=30, seed=1)))
    expected = reference_logprobs(decoder(arch), text, completion.tokens)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    assert steps == [1] * 29, "the first token comes of the prompt's step"
    await under_test.close()


@pytest.mark.parametrize("chunk", [512, 8])
async def test_rows_decode_with_it_beside_prompts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, steps, others = native(), [], []
    if compiled is None or compiled.products[torch.float32] == NONE:
        pytest.skip("no packed products on this processor")
    passed, computed = PagedCache._decoded, PagedCache.attend

    def decoded(self: PagedCache, *given: Any) -> torch.Tensor:
        steps.append(len(given[3].singles))
        return passed(self, *given)

    def attend(self: PagedCache, plan: Plan, table: np.ndarray) -> Any:
        others.append((len(plan.singles), [chunk.start > 0 for chunk in plan.chunks]))
        return computed(self, plan, table)

    monkeypatch.setattr(PagedCache, "_decoded", decoded)
    monkeypatch.setattr(PagedCache, "attend", attend)
    arch, texts = replace(BASE, head_dim=16), prompts(3, 20, 21)
    under_test = engine(arch, page_size=16, prefill_chunk=chunk)

    async def one(i: int) -> None:
        for _ in range(4 * i):  # steps that those before it are ahead
            await asyncio.sleep(0)
        completion = await under_test.generate(GenerateRequest(texts[i], SamplingParams(max_tokens=30, seed=i)))
        expected = reference_logprobs(decoder(arch), texts[i], completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)

    await asyncio.gather(*map(one, range(3)))
    assert {1, 2, 3} <= set(steps) and len(others) >= 3
    assert all(singles == 0 for singles, _ in others), "prompts by themselves, whoever decodes beside them"
    assert any(any(later) for _, later in others) == (chunk == 8)
    await under_test.close()


def test_a_prompt_beside_rows_that_decode(dtype: torch.dtype) -> None:
    """The rest of one, whose first page is another row's, too; and a row that sees what the prompt fills."""
    arch = SHAPES["qwen3"]
    weights = serve(decoder(arch, dtype=dtype).requires_grad_(False), Version(0), pack=True)
    table = np.array([[1, 4, 0], [1, 2, 0], [1, 2, 3]], np.int32)
    positions = np.array([32, 20, *range(16, 32)])
    pages = np.array([3, 4, *[2] * 16])
    singles, tokens = np.array([2, 0]), np.random.default_rng(0).integers(0, arch.vocab, 18)
    chunks, sampled = [Chunk(slot=1, start=16, count=16, row=2)], np.array([17, 1, 0])
    where, none = pages * 16 + positions % 16, np.empty((0, 2), np.int64)
    plan = Plan(
        singles, positions[:2] + 1, chunks, tokens, positions, where, sampled, sampled, sampled, sampled, none, [], []
    )
    found = []
    for of in (weights, replace(weights, decoding=None)):
        cache = filled(arch, dtype)
        with torch.inference_mode():
            found.append((cache.hidden(of, plan, table, plan.sample_rows), cache.kv))
    error = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=error, rtol=error)
