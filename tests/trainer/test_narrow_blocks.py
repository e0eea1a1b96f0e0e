"""Blocks of numbers in 8 or 16 bits: their error, their bytes, and what is not finite."""

import math

import pytest
import torch

from tidemill.trainer.narrow_blocks import BLOCK, decoded, encoded

BYTES = {"int8": BLOCK + 2, "bfloat16": 2 * BLOCK}


def there_and_back(values, kind):
    return decoded(encoded(values, kind), kind, values.dtype)


def blocks(count=200, dtype=torch.float32, seed=0):
    """Blocks whose magnitudes reach over 60 powers of ten, with zeros, and with one large number among small ones."""
    made = torch.Generator().manual_seed(seed)
    found = torch.randn(count, BLOCK, generator=made, dtype=torch.float64)
    found *= 10.0 ** torch.linspace(-32, 30, count, dtype=torch.float64)[:, None]
    found[::5] *= torch.rand(BLOCK, generator=made) < 0.1
    found[::7, 3] *= 1e6
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_number_moves_by_more_than_half_a_step(dtype):
    values = blocks(dtype=dtype)
    steps = values.abs().amax(1, keepdim=True) / 127
    assert ((there_and_back(values, "int8") - values).abs() <= 0.5001 * steps * (1 + 2**-8)).all()
    assert ((there_and_back(values, "bfloat16") - values).abs() <= values.abs() * 2**-8).all()


@pytest.mark.parametrize("kind", BYTES)
def test_what_was_decoded_is_encoded_to_the_same_bytes(kind):
    once = encoded(blocks(), kind)
    assert torch.equal(encoded(decoded(once, kind, torch.float32), kind), once)
    assert once.dtype == torch.uint8 and once.shape[1] == BYTES[kind]


@pytest.mark.parametrize("kind", BYTES)
def test_zeros_signs_and_shapes_stay(kind):
    assert not there_and_back(torch.zeros(3, BLOCK), kind).any()
    assert torch.equal(there_and_back(-blocks(), kind), -there_and_back(blocks(), kind))
    assert there_and_back(torch.empty(2, 0, BLOCK), kind).shape == (2, 0, BLOCK)
    assert torch.equal(there_and_back(blocks().view(4, 50, BLOCK), kind).view(200, BLOCK), there_and_back(blocks(), kind))


@pytest.mark.parametrize("tiny", [1e-45, 1e-41, 1e-38, 2.0**-120])
def test_a_block_too_small_for_a_scale_is_zero(tiny):
    assert not there_and_back(torch.full((1, BLOCK), tiny), "int8").any()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", BYTES)
def test_what_is_not_finite_is_seen_and_harms_no_other_block(kind, broken):
    values = blocks()
    values[50, 7] = broken
    found = there_and_back(values, kind)
    assert not found[50, 7].isfinite()
    others = torch.arange(len(values)) != 50
    assert torch.equal(found[others], there_and_back(blocks(), kind)[others])


def test_the_largest_float_stays_finite_in_int8():
    values = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    assert there_and_back(values, "int8").isfinite().all()
