"""Matrices in few bits: codes and scales by hand, the same numbers when they are quantised again, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from tidemill.models.quantised_weights import (
    BLOCK,
    BYTES,
    DYNAMIC,
    INT8,
    NF4,
    SCALES,
    dequantise,
    quantise,
    served_base,
)
from tidemill.models.weight_slices import Slice

KINDS = ["nf4", "int8"]
LARGE = torch.randn(700, 96, generator=torch.Generator().manual_seed(1))  # scales in more than four blocks of 256


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def same_again(weight: Tensor, kind: str) -> Tensor:
    """The matrix as it is quantised, which must be the same numbers, to the sign of zero, when it is quantised again."""
    once = dequantise(quantise(weight, kind))
    assert once.shape == weight.shape and once.dtype == torch.float32
    assert torch.equal(bits(dequantise(quantise(once, kind))), bits(once))
    return once


FINITE = st.floats(-float(np.float32(1e30)), float(np.float32(1e30)), width=32)
SMALL = st.floats(-1, 1, width=32)
MATRICES = arrays.array_shapes(min_dims=2, max_dims=2, max_side=40).flatmap(
    lambda shape: st.one_of(
        arrays.arrays(np.float32, shape, elements=FINITE), arrays.arrays(np.float32, shape, elements=SMALL, fill=SMALL)
    )
)


@pytest.mark.parametrize("kind", KINDS)
@given(matrix=MATRICES)
def test_what_was_dequantised_is_quantised_to_the_same_numbers(kind: str, matrix: np.ndarray) -> None:
    same_again(torch.from_numpy(matrix), kind)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), spread=st.floats(0, 40), rows=st.integers(1, 400), inputs=st.integers(1, 200))
def test_so_are_large_ones_with_scales_far_apart(kind: str, seed: int, spread: float, rows: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, inputs, generator=generator)
    same_again(weight * 10 ** (spread * (torch.rand(rows, 1, generator=generator) - 0.5)), kind)


@pytest.mark.parametrize("weight", [LARGE * 1e-44, LARGE * 1e28, torch.zeros(3, 50), -torch.zeros(2, 64), torch.ones(1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_extremes(kind: str, weight: Tensor) -> None:
    same_again(weight, kind)


def test_codes_and_scales_are_those_of_the_paper() -> None:
    """Each block by hand: the nearest of 16 entries, times a scale that is rounded to 8 bits from the mean scale."""
    found = quantise(LARGE, "nf4")
    blocks = LARGE.double().view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    table = torch.tensor(NF4, dtype=torch.float64)
    codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    assert torch.equal(found.codes.long(), codes[::2] * 16 + codes[1::2])

    mean = scales.mean()
    assert found.scales.codes is not None and found.scales.mean is not None and len(found.scales.numbers) == 5
    assert float(found.scales.mean) == pytest.approx(float(mean), rel=1e-7)
    expected = []
    for apart in (scales - mean).split(SCALES):
        largest = apart.abs().max()
        nearest = (apart / largest)[:, None].sub(torch.tensor(DYNAMIC, dtype=torch.float64)).abs().argmin(-1)
        expected.append(torch.tensor(DYNAMIC, dtype=torch.float64)[nearest] * largest + mean)
    rounded = torch.cat(expected)
    torch.testing.assert_close(found.scales.values().double(), rounded, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        dequantise(found).double(), (table[codes].view(-1, BLOCK) * rounded[:, None]).view(LARGE.shape), rtol=1e-6, atol=0
    )
    held = [found.codes, found.scales.codes, found.scales.numbers, found.scales.mean]
    assert sum(each.nbytes for each in held) == pytest.approx(BYTES["nf4"] * LARGE.numel(), rel=1e-3)


def test_the_codebooks_are_the_published_ones() -> None:
    """NF4 as its authors made it: quantiles of a normal distribution, 8 above 0 and 7 below. The map of scales has 256."""
    normal, offset = torch.distributions.Normal(0, 1), 0.9677083
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    every = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), every / every.max(), atol=2e-7, rtol=0)
    assert len(DYNAMIC) == len(set(DYNAMIC)) == 256 and DYNAMIC[-1] == 1.0 and DYNAMIC[127] == 0.0
    assert DYNAMIC[0] == pytest.approx(-0.99296875) and DYNAMIC[128] == pytest.approx(5.5e-7)
    assert len(INT8) == 255 and INT8[127] == 0.0 and INT8[254] == 1.0


def test_eight_bits_are_within_half_a_step() -> None:
    found = dequantise(quantise(LARGE, "int8"))
    step = LARGE.view(-1, BLOCK).abs().amax(1, keepdim=True) / 127
    assert ((found - LARGE).view(-1, BLOCK).abs() <= 0.5001 * step).all()
    assert (found - LARGE).abs().max() < 0.1 * (dequantise(quantise(LARGE, "nf4")) - LARGE).abs().max()


def test_a_scale_that_would_fall_below_zero_is_zero() -> None:
    """Scales far below the mean come out negative, which would turn the signs of their blocks."""
    weight = LARGE * torch.rand(len(LARGE), 1, generator=torch.Generator().manual_seed(5)) ** 2
    scales, once = quantise(weight, "nf4").scales, same_again(weight, "nf4")
    assert scales.codes is not None and scales.mean is not None
    each = scales.numbers.repeat_interleave(SCALES)[: len(scales.codes)]
    below = torch.tensor(DYNAMIC)[scales.codes.int()] * each < -scales.mean
    assert 2 <= below.sum() <= 100
    assert (once * weight >= 0).all()
    assert torch.equal(once.view(-1, BLOCK).any(1), ~below)


def test_the_base_that_is_served_is_made_matrix_by_matrix() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"]
    others = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]
    given = [Slice.whole(name, LARGE.to(torch.bfloat16)) for name in (*names, *others)]
    found = {piece.name: piece.tensor for piece in served_base(given, "nf4")}
    expected = dequantise(quantise(LARGE.to(torch.bfloat16), "nf4"))
    assert all(torch.equal(found[name], expected) for name in names)
    assert all(found[piece.name] is piece.tensor for piece in given if piece.name in others)
    again = [Slice.whole(name, tensor) for name, tensor in found.items()]
    assert all(torch.equal(piece.tensor, found[piece.name]) for piece in served_base(again, "nf4"))


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    part = Slice(name, (700, 96), (0, 0), LARGE[:350])
    with pytest.raises(ValueError, match=r"q_proj.weight: \[350, 96\] of \[700, 96\] came"):
        next(served_base([part], "nf4"))
    for bad in (float("nan"), float("inf"), 1e38):
        with pytest.raises(ValueError, match=r"q_proj.weight: it has a number that is not finite"):
            next(served_base([Slice.whole(name, LARGE + bad)], "int8"))
