import numpy as np
import pytest

from tidemill.algorithms.reductions import REDUCTIONS, reduction

LENGTHS, GROUPS = np.array([3, 1, 5, 0, 2]), np.array([7, 7, 4, 4, 9])


def direct(kind, terms, fixed):
    """The definitions over ragged terms, one list a sample."""
    counted = [i for i, t in enumerate(terms) if len(t)]
    if kind == "token":
        return sum(map(sum, terms)) / sum(map(len, terms))
    if kind == "sequence":
        return sum(np.mean(terms[i]) for i in counted) / len(counted)
    if kind == "attempt":
        return sum(map(sum, terms)) / len(counted)
    if kind == "fixed":
        return sum(map(sum, terms)) / (len(counted) * fixed)
    prompts = {g: np.concatenate([terms[i] for i in counted if GROUPS[i] == g]) for g in {GROUPS[i] for i in counted}}
    return sum(p.mean() for p in prompts.values()) / len(prompts)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_weights_and_scale_are_the_definition(kind):
    rng = np.random.default_rng(0)
    terms = [rng.normal(size=n) for n in LENGTHS]
    weights, scale = reduction(kind, LENGTHS, GROUPS, 16)
    assert scale * sum(w * t.sum() for w, t in zip(weights, terms, strict=True)) == pytest.approx(direct(kind, terms, 16))
    assert weights[3] == 0


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_order_of_samples_does_not_matter(kind):
    order = np.array([4, 2, 0, 1, 3])
    weights, scale = reduction(kind, LENGTHS, GROUPS, 16)
    shuffled, same = reduction(kind, LENGTHS[order], GROUPS[order], 16)
    np.testing.assert_allclose(shuffled, weights[order])
    assert scale == same


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_train_has_scale_zero(kind, lengths):
    weights, scale = reduction(kind, np.array(lengths), np.arange(len(lengths)), 4)
    assert scale == 0 and not weights.any()


def test_errors_say_what_is_expected():
    with pytest.raises(ValueError, match="token, sequence, prompt, attempt, fixed"):
        reduction("mean", LENGTHS, GROUPS)
    with pytest.raises(ValueError, match="positive number of tokens"):
        reduction("fixed", LENGTHS, GROUPS)
    with pytest.raises(ValueError, match="one number a sample"):
        reduction("token", LENGTHS, GROUPS[:2])
