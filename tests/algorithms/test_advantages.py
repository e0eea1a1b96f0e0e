import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9).map(np.array)


def by_hand(name, r):
    """The formulas once more, as loops."""
    n, mean = len(r), sum(r) / len(r)
    if name == "grpo":
        std = (sum((x - mean) ** 2 for x in r) / (n - 1)) ** 0.5
        return [(x - mean) / (std + 1e-6) for x in r]
    if name == "dr_grpo":
        return [x - mean for x in r]
    return [r[i] - sum(r[j] for j in range(n) if j != i) / (n - 1) for i in range(n)]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(r=rewards)
def test_matches_the_formula(name, r):
    expected = by_hand(name, r.tolist()) if r.min() != r.max() else np.zeros_like(r)
    np.testing.assert_allclose(ADVANTAGES[name](r), expected, atol=1e-9)


def test_grpo_uses_the_sample_standard_deviation():
    np.testing.assert_allclose(grpo(np.array([0.0, 1.0])), [-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)], rtol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("r", [[], [1.0], [3.0, np.nan], [0.1, 0.1, 0.1], [0.0] * 4, [np.nan, np.nan], [1.1] * 7])
def test_indistinguishable_rewards_give_exactly_zero(name, r):
    result = ADVANTAGES[name](np.array(r))
    assert result.shape == (len(r),)
    assert (result == 0).all()


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
def test_an_unscored_sibling_is_as_if_it_were_not_there(function):
    r = np.array([1.0, np.nan, 0.0, 0.5])
    result = function(r)
    assert result[1] == 0
    np.testing.assert_array_equal(result[[0, 2, 3]], function(r[[0, 2, 3]]))
    assert np.isnan(r[1])  # the argument is not written to
