"""Attention inside packed sequences, compiled: what PyTorch's is in float64, forwards and back, for sequences that share."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.models.attention import packed_attention
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cpu.packed_sequences import MOST_NUMBERS, Families
from tidemill.models.kernels.library import native

pytestmark = pytest.mark.skipif(native() is None, reason="no C compiler")


@st.composite
def families(draw: st.DrawFn, tile: int = 256) -> Families:
    """Up to seven sequences, some longer than a `tile`; equal ones, and ones that continue another."""
    near = st.integers(tile - tile // 16, tile + tile // 6)
    lengths = draw(st.lists(st.one_of(st.integers(1, 60), near, st.just(2 * tile + 18)), min_size=1, max_size=7))
    shared = [0]
    for before, length in itertools.pairwise(lengths):
        shared.append(draw(st.integers(0, min(before, length))))
    return Families.of(lengths, shared)


def operands(count: int, heads: tuple[int, int], size: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and what flows back."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, h, size, generator=generator) for h in (heads[0], heads[1], heads[1], heads[0]))  # type: ignore


def both_ways(attend, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def expected(of: Families, window: int | None, given: tuple[Tensor, ...]) -> list[Tensor]:
    exact = packed_attention(of, [window])
    return both_ways(lambda q, k, v: exact(0, q, k, v), *(x.double() for x in given))


def compiled(of: Families, window: int | None, given: tuple[Tensor, ...]) -> list[Tensor]:
    attend = packed_attention(of, [window])
    return both_ways(lambda q, k, v: attend(0, q, k, v), *given)


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max() / (1 + b.abs().max())) for a, b in zip(found, exact, strict=True))


@settings(max_examples=30)
@given(
    families(),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.sampled_from([None, 1, 3, 30, 256, 400]),
    st.integers(0, 99),
)
def test_it_is_attention_and_its_gradient(
    of: Families, heads: tuple[int, int], size: int, window: int | None, seed: int
) -> None:
    given = operands(of.tokens, heads, size, seed)
    assert worst(compiled(of, window, given), expected(of, window, given)) < 1e-5


def expected_of_rounded(of: Families, window: int | None, given: tuple[Tensor, ...], out: Tensor) -> list[Tensor]:
    """The same where, on the way back, the sum of d_out * out is one of the rounded `out`. It is taken from numbers that may
    be close to it: of a gradient of short sequences little may be left that this rounding does not reach."""
    q, k, v, d_out = (x.double() for x in given)
    exact, attend = expected(of, window, given), packed_attention(of, [window])
    off = (d_out * (exact[0] - out.double())).sum(-1, keepdim=True) * q.shape[2] ** -0.5
    seen_keys = both_ways(lambda *x: attend(0, *x), q, k, k, d_out)[0]  # each query's, by its weights
    of_keys = both_ways(lambda *x: attend(0, *x), q, k, v, off * q)[3]  # and what each key gets of all queries
    return [exact[0], exact[1] + off * seen_keys, exact[2] + of_keys, exact[3]]


def check_pairs(of: Families, size: int, window: int | None, seed: int) -> None:
    given = tuple(x.bfloat16() for x in operands(of.tokens, (3, 1), size, seed))
    found = compiled(of, window, given)
    for a, b in zip(found, expected_of_rounded(of, window, given, found[0]), strict=True):
        assert float((a.double() - b).norm()) <= 2**-7 * float(b.norm()) + 1e-4


@pytest.mark.runs
@settings(max_examples=30)
@given(families(), st.sampled_from([16, 32, 48, 64, 128]), st.sampled_from([None, 1, 3, 30, 256, 400]), st.integers(0, 99))
def test_pairs_of_bfloat16_are_those_of_neighbours(of: Families, size: int, window: int | None, seed: int) -> None:
    """Where beginnings end at odd positions, too: what is paired with the wrong neighbour, or left out, is far off."""
    check_pairs(of, size, window, seed)


@pytest.mark.parametrize("lengths, shared", [([2], [0]), ([3], [0]), ([3, 2], [0, 1]), ([5, 4, 7], [0, 3, 2])])
def test_pairs_of_bfloat16_in_short_sequences(lengths: list[int], shared: list[int]) -> None:
    for seed in range(100):
        check_pairs(Families.of(lengths, shared), 16, None, seed)


@pytest.mark.parametrize("narrow", ["all", "values"])
def test_bfloat16_is_rounded_where_it_comes_out(narrow: str) -> None:
    of = Families.of([70, 50, 80], [0, 30, 0])
    q, k, v, d_out = (x.bfloat16() for x in operands(of.tokens, (4, 2), 32, 0))
    given = (q, k, v, d_out) if narrow == "all" else (q.float(), k.float(), v, d_out)
    found, exact = compiled(of, None, given), expected(of, None, given)
    assert [x.dtype for x in found] == [v.dtype, *(x.dtype for x in given[:3])]
    assert 1e-5 < worst(found, exact) < 4e-3


def test_the_same_bits_for_any_number_of_threads() -> None:
    of = Families.of([90] * 9, [0, 40, 40, 0, 40, 40, 0, 40, 40])
    given, threads = operands(of.tokens, (4, 2), 32, 1), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(compiled(of, None, given))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_threads_share_even_a_small_batch(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of few short replies is already worth them."""
    asked, compute = [], kernels._library.tidemill_sequences
    spy = SimpleNamespace(tidemill_sequences=lambda *given: asked.append(given[-1]) or compute(*given))
    monkeypatch.setattr(kernels, "_library", spy)
    of, threads = Families.of([96] * 8, [0] + [64] * 7), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        kernels.see(*operands(of.tokens, (4, 2), 32, 5)[:3], of, None)
    finally:
        torch.set_num_threads(threads)
    assert asked == [2]


def test_operands_may_be_parts_of_larger_ones() -> None:
    of = Families.of([20, 9])
    q, k, v, d_out = operands(of.tokens, (4, 2), 32, 2)
    heads = torch.cat((q, k, v), dim=1)
    apart = compiled(of, None, (q, k, v, d_out))
    parts = (heads[:, :4], heads[:, 4:6], heads[:, 6:], d_out.transpose(1, 2).contiguous().transpose(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(apart, compiled(of, None, parts), strict=True))


@pytest.mark.parametrize("at", [3, 9])  # where the next sequence has a token, and beyond its end
@pytest.mark.parametrize("among", ["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_stays_in_its_sequence(dtype: torch.dtype, among: str, at: int) -> None:
    of = Families.of([20, 9])
    given = tuple(x.to(dtype) for x in operands(of.tokens, (2, 2), 16, 3))
    given[1 if among == "keys" else 2][at] = torch.nan
    out, *gradients = compiled(of, None, given)
    assert out[at:20].isnan().all() and not out[20:].isnan().any()
    assert among == "values" or not out[:at].isnan().any()
    assert gradients[0][:20].isnan().any() and not any(bool(g[20:].isnan().any()) for g in gradients)


def test_scores_may_be_far_apart() -> None:
    of = Families.of([300])
    q, k, v, d_out = operands(of.tokens, (1, 1), 16, 4)
    given = (30 * q, 30 * k, v, d_out)
    assert worst(compiled(of, None, given)[:1], expected(of, None, given)[:1]) < 1e-3


def test_what_it_is_made_for(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(dtype: torch.dtype, size: int) -> bool:
        of = Families.of([3, 2])
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "see", lambda *given: (given[0] * 0 + 7, None))
            return bool(
                (packed_attention(of, [None])(0, *(torch.zeros(5, 2, size, dtype=dtype) for _ in range(3))) == 7).all()
            )

    assert trains(torch.float32, 16) and trains(torch.bfloat16, MOST_NUMBERS)
    assert not any((trains(torch.float64, 16), trains(torch.float32, 8), trains(torch.float32, MOST_NUMBERS + 16)))


def test_families_are_told_by_what_they_share() -> None:
    of = Families.of([5, 4, 3, 6], [0, 2, 0, 3])
    assert of.families.tolist() == [0, 2, 4] and of.tokens == 5 + 2 + 3 + 3
    assert of.of_sequence(1).tolist() == [0, 1, 5, 6] and of.of_sequence(3).tolist() == [7, 8, 9, 10, 11, 12]
