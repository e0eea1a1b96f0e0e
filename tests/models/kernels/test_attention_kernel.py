"""The compiled attention over pages, against float64: any lengths, windows and sharing of pages, in any order of rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.kernels.cpu.bindings import Native

SHAPES = [  # heads, kv_heads, size, page_size
    (4, 2, 16, 16),
    (8, 8, 32, 16),
    (8, 2, 64, 32),
    (3, 1, 64, 16),
    (7, 1, 32, 16),
    (16, 1, 128, 48),
    (5, 5, 128, 16),
]
DTYPES = [torch.float32, torch.bfloat16]
PAGES = 90


def case(shape: tuple[int, int, int, int], dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, np.random.Generator]:
    """Pages, and queries of rows that do not follow one another, as the decoder gives them."""
    heads, kv_heads, size, page_size = shape
    assert Native.attends(dtype, heads, kv_heads, size, page_size)
    rng = np.random.default_rng(heads * size)
    pages = torch.from_numpy(rng.normal(size=(PAGES, kv_heads, page_size, 2 * size)).astype(np.float32)).to(dtype)
    wide = torch.from_numpy(rng.normal(size=(rows, heads + 3, size)).astype(np.float32) * 2).to(dtype)
    return pages, wide[:, :heads], rng


def expect(seen: Tensor, pages: Tensor, q: Tensor, table: np.ndarray, rows: list[tuple[int, int, int]], least=2e-6) -> None:
    """`rows`: slot, low and end of each. `least`: what float32 may be wrong by."""
    (heads, size), kv_heads = q.shape[1:], pages.shape[1]
    assert seen.dtype == q.dtype
    for row, (slot, low, end) in enumerate(rows):
        kv = pages[table[slot]].double().transpose(0, 1).reshape(kv_heads, -1, 2 * size)[:, low:end]
        kv = kv.repeat_interleave(heads // kv_heads, dim=0)
        scores = torch.einsum("he,hte->ht", q[row].double(), kv[..., :size]) * size**-0.5
        expected = torch.einsum("ht,hte->he", scores.softmax(-1), kv[..., size:])
        error = least if q.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(seen[row].double(), expected, atol=error, rtol=error)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_share_nothing(kernels: Native, shape, dtype, threads) -> None:
    """What lies behind a sequence's end is as good as not there."""
    ends = np.array([1, 2, shape[3], shape[3] + 1, 15, 16, 17, 600, 512, 513, 1100], np.int64)
    lows = np.array([0, 1, 0, 3, 14, 15, 0, 77, 0, 500, 1099], np.int64)
    pages, q, rng = case(shape, dtype, len(ends))
    table = rng.integers(0, PAGES, (20, -(-1100 // shape[3]))).astype(np.int32)
    slots = rng.permutation(20)[: len(ends)].astype(np.int64)
    seen = kernels.attend(pages, q, table, slots, lows, ends, rng.permutation(len(ends)), threads)
    expect(seen, pages, q, table, list(zip(slots, lows, ends, strict=True)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.runs
def test_rows_that_begin_with_the_same_pages(kernels: Native, shape, dtype, threads) -> None:
    """Families of every size, among them one that diverges step by step, twins without a token of their own, members of
    which one ends inside what they share, and windows that begin alike and not."""
    size = shape[3]
    families = [  # pages in common, tokens of each member, what it cannot see
        (0, [5], 0),
        (4, [4 * size + own for own in (1, 17, 40, 16, 3, 90, 2, 33)], 0),
        (2, [2 * size + 9] * 40, 0),
        (3, [3 * size, 3 * size, 3 * size + 1], 0),
        (3, [size + 3, 3 * size + 5, 5 * size], 0),
        (5, [5 * size + 30, 5 * size + 30, 5 * size + 31], 2 * size + 7),
        (6, [6 * size + 4] * 3, 6 * size - 1),
        (1, [2, 2, size - 1], 0),
        (2, [2 * size + 8, 2 * size + 8], 2 * size + 1),
    ]
    rows = [(common, end, low) for common, ends, low in families for end in ends]
    pages, q, rng = case(shape, dtype, len(rows) + 4)
    table = rng.integers(0, PAGES, (len(rows) + 4, 12)).astype(np.int32)
    at = 0
    for common, ends, _ in families:
        table[at : at + len(ends), :common] = table[at, :common]
        at += len(ends)
    for i, same in enumerate((6, 4, 2)):  # each has as much in common with the one before it
        table[at + i + 1, :same] = table[at + i, :same]
    ends = np.array([end for _, end, _ in rows] + [7 * size + 3] * 4, np.int64)
    lows = np.array([low for *_, low in rows] + [0] * 4, np.int64)
    lows[3] += size + 1  # one window begins later than its siblings'
    slots = np.arange(len(ends))
    orders = (slots, slots[::-1].copy(), rng.permutation(len(ends)))
    for order in orders:
        seen = kernels.attend(pages, q, table, slots, lows, ends, order, threads)
        expect(seen, pages, q, table, list(zip(slots, lows, ends, strict=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt, own", [(16, 0), (64, 1), (1040, 5), (64, 300)])
@pytest.mark.parametrize("samples", [1, 2, 8, 33])
def test_a_prompt_and_its_samples(kernels: Native, samples, prompt, own, dtype) -> None:
    """As much of it as fits at a time, and more."""
    shape = (4, 2, 64, 16)
    pages, q, rng = case(shape, dtype, samples)
    table = rng.integers(0, PAGES, (samples, (prompt + own) // 16 + 1)).astype(np.int32)
    table[:, : prompt // 16] = table[0, : prompt // 16]
    slots, ends = np.arange(samples), np.full(samples, prompt + own)
    seen = kernels.attend(pages, q, table, slots, np.zeros_like(ends), ends, slots, 1)
    expect(seen, pages, q, table, [(slot, 0, prompt + own) for slot in slots])


def test_as_many_rows_as_a_step_may_have(kernels: Native) -> None:
    """What is known of each row lies on the stack of the thread that calls, which is no larger for a long prompt."""
    most = next(each.le for each in EngineSettings.model_fields["prefill_chunk"].metadata if hasattr(each, "le")) + 4096
    pages, q, _ = case((4, 2, 16, 16), torch.float32, 1)
    slots, rows = np.zeros(most, np.int64), np.arange(most)
    with ThreadPoolExecutor(1) as pool:
        given = (pages, q.expand(most, -1, -1), np.zeros((1, 1), np.int32), slots, slots, slots + 7, rows, 2)
        seen = pool.submit(kernels.attend, *given).result(timeout=60)
    expect(seen[[0, -1]], pages, q.expand(2, -1, -1), np.zeros((1, 1), np.int32), [(0, 0, 7)] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart(kernels: Native, dtype) -> None:
    """The greatest score comes first, last, in what is shared or in what is not: nothing overflows, and it is for all."""
    pages, q, _ = case((2, 1, 32, 16), dtype, 6)
    q = q * 0 + 1
    table = np.concatenate((np.tile([0, 1, 2, 3, 4, 5], (6, 1)), np.arange(6, 36).reshape(6, 5)), axis=1).astype(np.int32)
    for row, token in enumerate([0, 70, 95, 96, 150, 170]):
        pages[table[row, token // 16], :, token % 16, :32] += 50
    slots, ends = np.arange(6), np.full(6, 171)
    seen = kernels.attend(pages, q, table, slots, np.zeros_like(ends), ends, slots, 1)
    expect(seen, pages, q, table, [(slot, 0, 171) for slot in slots], least=1e-4)  # scores near 300


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_hidden(kernels: Native, dtype, rows) -> None:
    pages = torch.ones(2, 1, 16, 64, dtype=dtype)
    pages[1, 0, 3] = torch.nan
    none, table, q = np.zeros(rows, np.int64), np.tile(np.array([[0, 1]], np.int32), (rows, 1)), torch.ones(rows, 4, 32)
    order, q = np.arange(rows), q.to(dtype)
    assert torch.isnan(kernels.attend(pages, q, table, none, none, none + 20, order, 1)).all()
    assert torch.isnan(kernels.attend(pages, q, table, none, none, none + 32, order, 1)).all()
    assert torch.isfinite(kernels.attend(pages, q, table, none, none, none + 19, order, 1)).all()
