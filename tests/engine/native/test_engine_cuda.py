"""Steps on a CUDA device: what is sent there, rows that fill up, and decoders that take turns, against a full forward.

Without a device by `gpu_in_pytorch`; the same engines run with the real kernels where there is one (`pytest -m gpu`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import FAMILIES, MemoryReceiver, decoder, engine, prompts, reference_logprobs, with_pages
from gpu_in_pytorch import InPyTorch, compute_again
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_parity import PATHS, run, siblings

from tidemill.core.errors import EngineFailed
from tidemill.core.types import Finish, SamplingParams
from tidemill.engine.native import cuda_graphs
from tidemill.engine.native.cuda_graphs import (
    GpuCache,
    GraphShape,
    Inputs,
    numbers_of,
    recorded_shape,
    row_counts,
    shape_of,
    token_count,
)
from tidemill.engine.native.kv_blocks import NULL_PAGE, BlockManager
from tidemill.engine.native.scheduler import Scheduler
from tidemill.engine.native.step_plan import Sequence

ENDS = [Finish.STOP, Finish.LENGTH]
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=ON)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        compute_again(monkeypatch)
    return request.param


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_equal_a_full_forward(family: str, path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = replace(FAMILIES[family], head_dim=16)
    if path.startswith("preempted"):
        with_pages(monkeypatch, 26)
    under_test = engine(arch, **{"device": device, **PATHS[path]})
    assert isinstance(under_test._cache, GpuCache)
    texts = siblings()
    completions = await run(under_test, texts, [SamplingParams(max_tokens=20, seed=i) for i in range(len(texts))])
    model = decoder(arch)
    for text, completion in zip(texts, completions, strict=True):
        expected = reference_logprobs(model, text, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5 if device == "cpu" else 2e-3)
    assert ((await under_test.stats()).preemptions > 0) == path.startswith("preempted")
    await under_test.close()


async def test_steps_of_many_small_chunks_are_not_recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list[GraphShape | None]()
    monkeypatch.setattr(
        cuda_graphs, "recorded_shape", lambda *given: shapes.append(None) if given[0].tiles else recorded_shape(*given)
    )
    arch = replace(FAMILIES["qwen3"], head_dim=16)
    under_test = engine(arch, device=device, prefill_chunk=5)
    texts = siblings()
    completions = await run(under_test, texts, [SamplingParams(max_tokens=9, seed=i) for i in range(len(texts))])
    for text, completion in zip(texts, completions, strict=True):
        expected = reference_logprobs(decoder(arch), text, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5 if device == "cpu" else 2e-3)
    assert shapes
    await under_test.close()


async def test_a_step_that_is_too_large_for_the_room_gets_more(device: str) -> None:
    """What was recorded is recorded again."""
    arch = replace(FAMILIES["qwen3"], head_dim=16)
    under_test = engine(arch, device=device)
    cache: Any = under_test._cache
    rooms = []
    for count, length in ((1, 2), (1, 2), (6, 80), (1, 2)):
        texts = [(np.arange(length, dtype=np.int32) + i) % arch.vocab for i in range(count)]
        for text, found in zip(texts, await run(under_test, texts, [SamplingParams(max_tokens=6)] * count), strict=True):
            expected = reference_logprobs(decoder(arch), text, found.tokens)
            np.testing.assert_allclose(found.logprobs, expected, atol=2e-5 if device == "cpu" else 2e-3)
        rooms.append((len(cache._numbers), sum(map(len, cache._recorded.values()))))
    (small, two), again, (large, anew), (same, more) = rooms
    assert again == (small, two) and large == same > small
    assert (two, anew, more) == (2, 2, 4), "a prompt and single rows; many of both; and the former once more"
    await under_test.close()


async def test_after_an_update_the_other_decoder_is_computed_with(device: str) -> None:
    """And after the next one the first again, whose records are still good: an update writes into the same memory."""
    arch = replace(FAMILIES["qwen3"], head_dim=16)
    receiver = MemoryReceiver()
    under_test = engine(arch, receiver=receiver, device=device)
    text = np.arange(9, dtype=np.int32)
    for step in range(5):
        if step:
            await under_test.update(receiver.publish(step, decoder(arch, seed=step)))
        [completion] = await run(under_test, [text], [SamplingParams(max_tokens=12, seed=step)])
        expected = reference_logprobs(decoder(arch, seed=step), text, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5 if device == "cpu" else 2e-3)
    first, second = under_test._cache._recorded.values()  # pyright: ignore
    assert set(first) == set(second) == {GraphShape(16, 0, 13 if device == "cpu" else 8), GraphShape(1, 1, 0)}
    await under_test.close()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 6), st.integers(0, 2), st.data()
)
def test_what_is_sent_is_the_plan(lengths: list[int], page_size: int, tile: int, more: int, data: st.DataObject) -> None:
    """Also of a shape that is larger than the plan's."""
    scheduler = Scheduler(
        BlockManager(200, page_size), max_sequences=8, context=64, prefill_chunk=data.draw(st.integers(1, 99))
    )
    waiting = [Sequence(np.arange(length, dtype=np.int32) + number, limit=60) for number, length in enumerate(lengths)]
    for _ in range(6):  # prompts come one by one, so that there are steps of all kinds
        if waiting:
            scheduler.submit(waiting.pop())
        plan = scheduler.plan()
        assert plan is not None
        exact = shape_of(plan, tile)
        shape = GraphShape(exact.tokens + more, exact.rows + more, exact.tiles + more)
        numbers = numbers_of(plan, scheduler.table, page_size, tile, shape)
        assert numbers.dtype == np.int32
        sent = Inputs.of(torch.from_numpy(numbers), shape)
        here, decoding, width = exact.tokens, exact.rows, int(sent.width)
        for name in ("tokens", "positions", "writes"):
            values = getattr(sent, name)
            assert values[:here].tolist() == getattr(plan, name).tolist() and not values[here:].any()
        assert sent.lengths[:decoding].tolist() == plan.lengths.tolist() and not sent.lengths[decoding:].any()
        table = sent.table.view(-1, width)
        assert not table[decoding : shape.rows].any() and NULL_PAGE == 0, "rows that fill up read the null page"
        for row, (slot, length) in enumerate(zip(plan.singles, plan.lengths, strict=True)):
            pages = -(-int(length) // page_size)
            assert table[row, :pages].tolist() == scheduler.table[slot, :pages].tolist()
        queries = dict[int, tuple[int, int]]()  # of chunks: where it stands, its slot and position
        for of, first, position, count in sent.tiles.tolist():
            assert count <= tile
            for i in range(count):
                chunk = plan.chunks[of - shape.rows]
                pages = -(-(position + i + 1) // page_size)
                assert table[of, :pages].tolist() == scheduler.table[chunk.slot, :pages].tolist()
                assert queries.setdefault(first + i, (chunk.slot, position + i)) == (chunk.slot, position + i)
        expected = {c.row + i: (c.slot, c.start + i) for c in plan.chunks for i in range(c.count)}
        assert queries == expected and sum(sent.tiles[:, 3].tolist()) == len(expected)
        scheduler.advance(plan)
        scheduler.learn(plan, np.full(len(plan.sample_slots), 7))


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(0, 300), st.integers(1, 1024), st.sampled_from([8, 32, 64]))
def test_a_shape_that_is_recorded_has_room(tokens: int, rows: int, chunks: int, slots: int, tile: int) -> None:
    rows, chunks = min(rows, slots), min(chunks, slots, tokens // 2)
    exact = GraphShape(rows + tokens, rows, tokens // tile + chunks) if chunks else GraphShape(max(rows, 1), max(rows, 1), 0)
    shape = recorded_shape(exact, slots, tile)
    if shape is None:  # chunks of less than 16 tokens, by and large
        assert chunks > max(8, exact.tokens // 16)
        return
    assert shape.tokens >= max(exact.tokens, shape.rows) and shape.rows >= exact.rows and shape.tiles >= exact.tiles
    assert recorded_shape(shape, slots, tile) == shape or not exact.tiles


def test_few_shapes_are_recorded_and_little_computed_in_vain() -> None:
    for most in (1, 5, 100, 1024):
        counts = row_counts(most)
        assert counts == sorted(set(counts)) and counts[-1] >= most and len(counts) < 50
        for rows in range(64, most + 1):
            assert next(c for c in counts if c >= rows) <= rows * 1.25
    for tokens in range(64, 5000):
        assert tokens <= token_count(tokens) <= tokens * 1.25
    shapes = {recorded_shape(GraphShape(256 + n, 256, -(-n // 32)), 256, 32) for n in range(16, 2049)}
    assert None not in shapes and len(shapes) < 20


async def test_a_step_is_launched_before_what_the_last_one_sampled_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it computes of rows that had stopped is nobody's, though others take their slots and pages at once."""
    arch, done = replace(FAMILIES["qwen3"], head_dim=16), list[str]()
    sampling = InPyTorch.sampling

    def noted(*given: Any) -> Callable[[], Any]:
        read = sampling(*given)
        done.append("launched")
        return lambda: (done.append("read"), read())[1]

    texts = [*siblings(), *prompts(10, 3, 12, seed=5)]
    plain = engine(arch, max_sequences=3, eos_ids=(7, 11))
    params = [
        SamplingParams(max_tokens=3 + 5 * i % 17, seed=i, temperature=(0.0, 1.0, 0.7)[i % 3]) for i in range(len(texts))
    ]
    expected = await run(plain, texts, params)
    compute_again(monkeypatch)
    monkeypatch.setattr(InPyTorch, "sampling", noted)
    ahead = engine(arch, max_sequences=3, eos_ids=(7, 11))
    for one, other in zip(expected, await run(ahead, texts, params), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    stats = await ahead.stats()
    assert stats.generated == sum(len(c.tokens) for c in expected) and {c.finish for c in expected} == set(ENDS)
    in_between = [done[:at].count("launched") - done[:at].count("read") for at in range(1, len(done))]
    assert max(in_between) == 2 and min(in_between) == 1 and len(done) == 2 * done.count("read")
    scheduler = ahead._scheduler
    assert scheduler.blocks.available == scheduler.blocks.usable and not scheduler.in_flight
    await plain.close()
    await ahead.close()


async def test_a_step_that_had_to_know_first_may_find_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pages run short: everything may have ended with the step before."""
    compute_again(monkeypatch)
    under_test = engine(replace(FAMILIES["qwen3"], head_dim=16))
    monkeypatch.setattr(under_test._scheduler, "may_preempt", lambda: True)
    for count in (1, 3):
        done = await run(under_test, prompts(count), [SamplingParams(max_tokens=5)] * count)
        assert [len(each.tokens) for each in done] == [5] * count
    await under_test.close()


async def test_a_step_whose_result_cannot_be_read_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever it is that has to know it."""
    compute_again(monkeypatch)
    under_test = engine(replace(FAMILIES["qwen3"], head_dim=16))
    calls = [asyncio.ensure_future(run(under_test, [text], [SamplingParams(max_tokens=60)])) for text in prompts(3)]
    while under_test._under_way is None:
        await asyncio.sleep(0)
    under_test._under_way.read = lambda: (_ for _ in ()).throw(MemoryError("the device is gone"))
    with pytest.raises(MemoryError):
        await under_test.abort("nobody")
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineFailed) and "the device is gone" in str(result)
    await under_test.close()
