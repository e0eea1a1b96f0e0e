"""The sampler against the distributions it claims to sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import kept
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.types import SamplingParams
from tidemill.engine.native.sampler import RowParams, draw, mixed, sample, truncate, uniforms

CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top-p": SamplingParams(top_p=0.8),
    "top-k": SamplingParams(top_k=5),
    "min-p": SamplingParams(min_p=0.2),
    "all": SamplingParams(temperature=1.4, top_p=0.9, top_k=12, min_p=0.03),
}


def rows(params: list[SamplingParams], uniform: np.ndarray) -> RowParams:
    return RowParams(
        *(np.array([getattr(p, n) for p in params], np.float64) for n in ("temperature", "top_p")),
        top_k=np.array([p.top_k for p in params]),
        min_p=np.array([p.min_p for p in params], np.float64),
        uniform=uniform,
    )


@pytest.mark.parametrize("vocab", [40, 700])
@pytest.mark.parametrize("case", CASES)
def test_chi_square(case, vocab):
    params, draws = CASES[case], 8000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    uniform = uniforms(mixed(np.arange(draws, dtype=np.uint64)), np.full(draws, 17))
    got = sample(logits.expand(draws, -1), rows([params] * draws, uniform))
    expected = np.exp(kept(logits.double().numpy(), params)) * draws
    observed = np.bincount(got.tokens, minlength=vocab)
    assert not observed[expected == 0].any(), "a truncated token was sampled"
    likely = expected >= 5
    pooled = np.append(expected[likely], expected[~likely].sum()), np.append(observed[likely], observed[~likely].sum())
    statistic = (((pooled[1] - pooled[0]) ** 2) / np.maximum(pooled[0], 1e-9))[pooled[0] > 0].sum()
    freedom = (pooled[0] > 0).sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 6, f"chi-square {statistic} at {freedom} degrees of freedom"
    np.testing.assert_allclose(got.logprobs, np.log(expected[got.tokens] / draws), atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 3
    params, uniform = list(CASES.values()), np.linspace(0.1, 0.9, 6)
    together = sample(logits, rows(params, uniform))
    for i in range(6):
        alone = sample(logits[i : i + 1], rows(params[i : i + 1], uniform[i : i + 1]))
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)
        assert (0 in alone.supports) == (i in together.supports) == (i >= 2)


def test_wide_supports_are_looked_for_in_the_whole_vocabulary():
    logprobs = torch.log_softmax(torch.zeros(1, 5000), -1)  # 95 % of it takes far more than the first candidates
    _, values = truncate(logprobs, np.array([0]), np.array([0.95]), np.array([0.0]))
    assert abs(int((values > -torch.inf).sum()) - 4750) <= 1
    _, values = truncate(logprobs, np.array([1000]), np.array([0.5]), np.array([0.0]))
    assert abs(int((values > -torch.inf).sum()) - 500) <= 1


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-38, 1e-8, 0.3, 1.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]),
    st.integers(1, 30),
)
@settings(max_examples=200)
def test_never_a_token_of_probability_zero(weights, uniform, repeat):
    probabilities = torch.tensor([weights * repeat], dtype=torch.float32)  # narrow and wide rows
    token = int(draw(probabilities, torch.tensor([[uniform]], dtype=torch.float64)))
    assert probabilities[0, token] > 0


def test_the_end_of_the_distribution_is_its_last_possible_token():
    last = torch.full((200, 1), 1 - 2**-53, dtype=torch.float64)
    probabilities = torch.zeros(200, 1024)
    probabilities[:, 300:490] = torch.rand(200, 190, generator=torch.Generator().manual_seed(0)) + 0.1
    assert set(draw(probabilities, last)[:, 0].tolist()) == {489}  # block sums are rounded, up or down
    assert set(draw(probabilities[:, 256:512].contiguous(), last)[:, 0].tolist()) == {489 - 256}


def test_draw_inverts_the_cumulative_distribution():
    probabilities = torch.rand(1, 1001, generator=torch.Generator().manual_seed(0)).float() ** 4
    exact = np.cumsum(probabilities[0].double().numpy())
    uniform = (np.arange(4000) + 0.5) / 4000
    got = draw(probabilities.expand(4000, -1).contiguous(), torch.from_numpy(uniform)[:, None])[:, 0].numpy()
    expected = np.searchsorted(exact, uniform * exact[-1], side="right")
    assert (got == expected).mean() > 0.999  # the rest lies on a rounding boundary
    assert np.abs(got - expected).max() <= 1


def test_uniforms_are_a_function_of_seed_and_position_only():
    seeds, positions = mixed(np.array([1, 1, 2, 2**63 - 1], np.uint64)), np.array([0, 1, 0, 5])
    first = uniforms(seeds, positions)
    np.testing.assert_array_equal(first[::-1], uniforms(seeds[::-1].copy(), positions[::-1].copy()))
    assert len(set(first.tolist())) == 4 and (first >= 0).all() and (first < 1).all()
    many = uniforms(np.repeat(mixed(np.arange(300, dtype=np.uint64)), 300), np.tile(np.arange(300), 300))
    counts = np.histogram(many, 50, (0, 1))[0]
    assert ((counts - 1800) ** 2 / 1800).sum() < 49 + 5 * np.sqrt(98)
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


def test_non_finite_logits_are_an_error():
    logits = torch.zeros(2, 8)
    logits[1, 3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, rows([SamplingParams()] * 2, np.array([0.3, 0.3])))


@pytest.mark.parametrize("vocab", [40, 700])
def test_no_row_at_all(vocab):
    """A step that only scores samples nothing."""
    got = sample(torch.zeros(0, vocab), rows([], np.zeros(0)))
    assert len(got.tokens) == len(got.logprobs) == 0 and not got.supports
