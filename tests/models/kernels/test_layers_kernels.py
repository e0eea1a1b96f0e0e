"""What lies between the matrix products, and sampling: the kernels against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tidemill.models.decoder import rotate
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.library import native, without_gradient
from tidemill.models.kernels.rotation import Rotation

DTYPES = [torch.float32, torch.bfloat16]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # bfloat16: roundings on the way may fall to the other side


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), weight.shape, None, eps).to(x.dtype).double() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 17), (70, 64), (40, 1000)])
def test_norm(kernels: Native, dtype, rows, size) -> None:
    torch.manual_seed(rows)
    wide = (torch.randn(rows, size + 5) * 3).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)
    found = kernels.norm(x, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), normed(x, weight, 1e-6), atol=ERROR[dtype], rtol=ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("n, queries, keys, size", [(1, 1, 1, 2), (5, 4, 2, 16), (60, 3, 1, 24), (33, 8, 8, 64)])
def test_rotate(kernels: Native, dtype, with_norms, n, queries, keys, size) -> None:
    torch.manual_seed(n)
    heads = (torch.randn(n, queries + 2 * keys, size) * 2).to(dtype)
    angles = torch.rand(n, 1, size // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if with_norms else None
    *found, others = kernels.rotate(heads, Rotation(cos, sin, queries, keys, norms, 1e-5))
    assert torch.equal(others, heads[:, queries + keys :])
    q, k = heads[:, :queries], heads[:, queries : queries + keys]
    if norms is not None:
        q, k = normed(q, norms[0], 1e-5).to(dtype), normed(k, norms[1], 1e-5).to(dtype)
    expected = rotate(torch.cat((q, k), dim=1).double(), cos.double(), sin.double())
    torch.testing.assert_close(torch.cat(found, dim=1).double(), expected, atol=4 * ERROR[dtype], rtol=4 * ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, size", [(1, 1), (7, 13), (50, 256)])
def test_gate(kernels: Native, dtype, n, size) -> None:
    x = (torch.randn(n, 2 * size) * 20).to(dtype)
    x[0, 0] = -200.0
    found, gate, up = kernels.gate(x), x[:, :size].double(), x[:, size:].double()
    expected = F.silu(gate) * up
    torch.testing.assert_close(found.double(), expected, atol=ERROR[dtype], rtol=ERROR[dtype])


def test_they_stand_back_where_a_gradient_is_wanted() -> None:
    x = torch.ones(3)
    assert without_gradient(x) is None
    with torch.no_grad():
        assert without_gradient(x) is native()
        for other in (x.double(), x.half(), x.to("meta")):
            assert without_gradient(other) is None and without_gradient(x, other) is None
        assert without_gradient(x, x.bfloat16()) is native()


@pytest.mark.parametrize("vocab", [1, 2, 61, 256, 257, 5000])
def test_sample(kernels: Native, vocab) -> None:
    """The first token whose cumulative probability exceeds the uniform number, and its exact logprobs."""
    rng = np.random.default_rng(vocab)
    n = 300
    logits = torch.from_numpy(rng.normal(size=(n, vocab)).astype(np.float32) * 3)
    logits[:40, vocab // 2 + 1 :] = -torch.inf
    logits[40:80, : vocab // 2] = -torch.inf
    temperature = rng.choice([1.0, 0.0, 0.3, 2.0, 1e-3], n)
    uniform = rng.random(n)
    uniform[::7], uniform[1::7] = 0.0, np.nextafter(1.0, 0.0)
    tokens, logprobs, model = kernels.sample(logits, temperature, uniform)
    exact = logits.double().log_softmax(-1).numpy()
    np.testing.assert_allclose(model, exact[np.arange(n), tokens], atol=2e-6, rtol=1e-6)
    greedy = temperature == 0
    assert (tokens[greedy] == logits.numpy()[greedy].argmax(-1)).all() and (logprobs[greedy] == 0).all()
    heat = torch.from_numpy(np.where(greedy, 1, temperature))[:, None]
    tempered = (logits.double() / heat).log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs[~greedy], tempered[np.arange(n), tokens][~greedy], atol=2e-6, rtol=4e-6)
    assert np.isfinite(logprobs).all()  # a token of probability zero is never drawn
    cumulative = np.exp(tempered).cumsum(-1)
    after, before = cumulative[np.arange(n), tokens], np.where(tokens > 0, cumulative[np.arange(n), tokens - 1], 0)
    inside = (before - 2e-6 <= uniform) & (uniform <= after + 2e-6)
    assert inside[~greedy].all()


def test_sampling_frequencies(kernels: Native) -> None:
    probabilities = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    n = 20_000
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).expand(n, 5).contiguous()
    tokens, _, _ = kernels.sample(logits, np.ones(n), (np.arange(n) + 0.5) / n)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / n, probabilities, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_shows(kernels: Native, bad) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 270] = bad
    for temperature in (0.0, 0.5, 1.0):
        _, logprobs, model = kernels.sample(logits, np.full(2, temperature), np.full(2, 0.5))
        assert np.isfinite(model[0]) and np.isfinite(logprobs[0]) and not np.isfinite(model[1])
    nothing = torch.full((1, 4), -torch.inf)
    assert not np.isfinite(kernels.sample(nothing, np.ones(1), np.zeros(1))[2]).any()
