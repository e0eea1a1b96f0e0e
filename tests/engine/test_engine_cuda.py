"""Steps on a CUDA device: what is sent there, rows that fill up, and decoders that take turns, against a full forward.

Without a device the kernels' contracts are met by PyTorch, and a recorded step is computed again; the same engines run with
the real ones where there is a device (`pytest -m gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import FAMILIES, MemoryReceiver, decoder, engine, reference_logprobs, with_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_parity import PATHS, run, siblings
from torch import Tensor

from tidemill.engine import core
from tidemill.engine.blocks import NULL_PAGE, BlockManager
from tidemill.engine.cuda import GpuCache, Inputs, numbers_of, row_counts
from tidemill.engine.scheduler import Scheduler, Sequence
from tidemill.types import SamplingParams

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class InPyTorch:
    """What `kernels.gpu.Gpu` promises of `attend` and `write`."""

    def write(self, pages: Tensor, k: Tensor, v: Tensor, writes: Tensor) -> None:
        size = pages.shape[2]
        for row, to in enumerate(writes.tolist()):
            pages[to // size, :, to % size] = torch.cat((k[row], v[row]), dim=-1)

    def attend(self, pages: Tensor, q: Tensor, table: Tensor, width: Tensor, lengths: Tensor, window: int | None) -> Tensor:
        out = torch.full_like(q, torch.nan)
        columns, size, group = int(width), q.shape[2], q.shape[1] // pages.shape[1]
        for row, length in enumerate(lengths.tolist()):
            own = pages[table[row * columns : (row + 1) * columns].long()]  # [columns, K, page, 2 E]
            seen = slice(max(0, length - (window or length)), length)
            kv = own.transpose(0, 1).flatten(1, 2)[:, seen].repeat_interleave(group, 0)
            weights = torch.softmax((kv[..., :size] @ q[row, :, :, None]).squeeze(-1) * size**-0.5, -1)
            out[row] = (weights[:, None] @ kv[..., size:]).squeeze(1)
        return out


class ComputedAgain(GpuCache):
    records = 0

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.records += 1
        hidden = compute()

        def again() -> None:
            hidden.fill_(torch.nan)  # what no replay writes shows
            hidden.copy_(compute())

        return again, hidden


@pytest.fixture(params=ON)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(core, "paged_cache", lambda *shape: ComputedAgain(*shape, InPyTorch()))  # pyright: ignore
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
    recorded = under_test._cache._recorded  # pyright: ignore
    assert len(recorded) == 2 and all(list(counts) == [1] for counts in recorded.values())
    await under_test.close()


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 5))
def test_what_is_sent_is_the_plan(lengths: list[int], page_size: int, fill: int) -> None:
    scheduler = Scheduler(BlockManager(200, page_size), max_sequences=8, context=64, prefill_chunk=1000)
    for number, length in enumerate(lengths):
        scheduler.submit(Sequence(np.arange(length, dtype=np.int32) + number, limit=60))
    for _ in range(3):  # the first computes the prompts
        plan = scheduler.plan()
        assert plan is not None
        rows = len(plan.singles) if plan.chunks else len(plan.singles) + fill
        numbers = numbers_of(plan, scheduler.table, page_size, None if plan.chunks else rows)
        assert numbers.dtype == np.int32
        tokens = len(plan.tokens) if plan.chunks else rows
        sent = Inputs.of(torch.from_numpy(numbers), tokens, rows)
        here, decoding = len(plan.tokens), len(plan.singles)
        assert (
            sent.tokens[:here].tolist() == plan.tokens.tolist() and sent.positions[:here].tolist() == plan.positions.tolist()
        )
        assert (
            sent.writes[:here].tolist() == plan.writes.tolist() and sent.lengths[:decoding].tolist() == plan.lengths.tolist()
        )
        table = sent.table.view(rows, int(sent.width)) if rows else sent.table
        for row, (slot, length) in enumerate(zip(plan.singles, plan.lengths, strict=True)):
            pages = -(-int(length) // page_size)
            assert table[row, :pages].tolist() == scheduler.table[slot, :pages].tolist()
        assert set(sent.writes[here:].tolist()) <= {NULL_PAGE * page_size} and set(sent.lengths[decoding:].tolist()) <= {1}
        assert not table[decoding:].any(), "rows that fill up read the null page"
        scheduler.advance(plan, np.full(len(plan.sample_slots), 7))


def test_few_rows_are_computed_in_vain() -> None:
    for most in (1, 5, 100, 1024):
        counts = row_counts(most)
        assert counts == sorted(set(counts)) and counts[-1] >= most and len(counts) < 50
        for rows in range(64, most + 1):
            assert next(c for c in counts if c >= rows) <= rows * 1.25
