"""Each loss against its formula in plain floats, and its advantages against finite differences of that loss."""

import dataclasses
import inspect
import math

import numpy as np
import pytest

from tidemill.algorithms import preferences
from tidemill.algorithms.preferences import PREFERENCES, WITH_REFERENCE, Pairs, bradley_terry, kto, kto_baseline, pairs_of

CASES = [
    ("dpo", {}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}),
    ("ipo", {}),
    ("ipo", {"beta": 0.5}),
    ("orpo", {}),
    ("orpo", {"weight": 1.5}),
    ("simpo", {}),
    ("simpo", {"beta": 2.0, "gamma_ratio": 0.25}),
]


def make(seed=0, p=32):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, (2, p))
    sums = -rng.exponential(1.0, (2, p)) * lengths - 0.01
    reference = sums + rng.normal(0, 3, (2, p))
    return Pairs(*sums, *lengths, *reference)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def by_hand(name, x, c):
    """[(loss, margin)], one a pair."""
    result = []
    rows = zip(
        x.chosen, x.rejected, x.chosen_length, x.rejected_length, x.chosen_reference, x.rejected_reference, strict=True
    )
    for w, r, n_w, n_r, ref_w, ref_r in rows:
        beta, e = c.get("beta", 2.5 if name == "simpo" else 0.1), c.get("label_smoothing", 0.0)
        h, m = (w - ref_w) - (r - ref_r), (w - ref_w) / n_w - (r - ref_r) / n_r
        odds = [math.exp(s / n) / (1 - math.exp(s / n)) for s, n in ((w, n_w), (r, n_r))]
        z, u = math.log(odds[0] / odds[1]), beta * (w / n_w - r / n_r)
        result.append(
            {
                "dpo": (-(1 - e) * log_sigmoid(beta * h) - e * log_sigmoid(-beta * h), beta * h),
                "ipo": ((m - 1 / (2 * beta)) ** 2, beta * m),
                "orpo": (-w / n_w - c.get("weight", 0.1) * log_sigmoid(z), z),
                "simpo": (-log_sigmoid(u - c.get("gamma_ratio", 0.55) * beta), u),
            }[name]
        )
    return np.array(result).T


@pytest.mark.parametrize(("name", "constants"), CASES)
def test_value_and_margin_match_the_formula(name, constants):
    x = make()
    result = PREFERENCES[name](x, **constants)
    np.testing.assert_allclose([result.loss, result.margin], by_hand(name, x, constants), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "constants"), CASES)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_advantages_are_minus_the_derivative_of_the_loss(name, constants, side):
    x, h = make(1), 1e-5
    losses = [PREFERENCES[name](dataclasses.replace(x, **{side: getattr(x, side) + d}), **constants).loss for d in (h, -h)]
    advantage = getattr(PREFERENCES[name](x, **constants), side)
    np.testing.assert_allclose(advantage, -(losses[0] - losses[1]) / (2 * h), rtol=1e-6, atol=1e-6)
    assert advantage.any()


@pytest.mark.parametrize("name", PREFERENCES)
def test_advantages_on_tokens_are_the_gradient_of_the_mean_loss(name):
    """The way a trainer uses them: -1/p * sum over sequences of A * sum over tokens of grad log pi, here of one softmax."""
    rng = np.random.default_rng(2)
    logits, h, p = rng.normal(0, 1, 5), 1e-5, 6
    answers = [[rng.integers(0, 5, rng.integers(1, 9)) for _ in range(p)] for _ in range(2)]
    lengths = [np.array([len(a) for a in side]) for side in answers]
    reference = [np.array([-1.5 * len(a) for a in side]) for side in answers]

    def pairs(logits):
        log_pi = logits - np.log(np.exp(logits).sum())
        return Pairs(*([log_pi[a].sum() for a in side] for side in answers), *lengths, *reference)

    def arrays(x):
        return dataclasses.replace(x, chosen=np.array(x.chosen), rejected=np.array(x.rejected))

    result = PREFERENCES[name](arrays(pairs(logits)))
    gradient = np.zeros(5)
    for side, advantages in zip(answers, (result.chosen, result.rejected), strict=True):
        for tokens, a in zip(side, advantages, strict=True):
            for token in tokens:
                gradient -= a / p * (np.eye(5)[token] - np.exp(logits) / np.exp(logits).sum())
    mean = lambda z: PREFERENCES[name](arrays(pairs(z))).loss.mean()  # noqa: E731
    expected = [(mean(logits + h * e) - mean(logits - h * e)) / (2 * h) for e in np.eye(5)]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "constants"), CASES)
def test_extremes_are_finite(name, constants):
    sums = np.array([0.0, -1e-12, -1e-3, -50.0, -1e5])
    chosen, rejected = (side.ravel() for side in np.meshgrid(sums, sums))
    lengths = np.ones(len(chosen), np.int64)
    x = Pairs(chosen, rejected, lengths, lengths, np.full(len(chosen), -7.0), np.full(len(chosen), -1e4))
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        result = PREFERENCES[name](x, **constants)
    for values in dataclasses.astuple(result):
        assert np.isfinite(values).all()


def test_dpo_stops_pulling_when_the_margin_is_large_and_pulls_with_beta_when_it_is_wrong():
    sums, zero, one = np.array([1e4, 0.0, -1e4]), np.zeros(3), np.ones(3)
    result = preferences.dpo(Pairs(sums, zero, one, one, zero, zero), beta=0.1)
    np.testing.assert_allclose(result.chosen, [0, 0.05, 0.1], rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(result.loss, [0, math.log(2), 1000], rtol=1e-12, atol=1e-300)
    np.testing.assert_array_equal(result.rejected, -result.chosen)


def test_golden():
    x = Pairs(*np.array([[-2.0], [-6.0], [2], [3], [-4.0], [-3.0]]))
    assert preferences.ipo(x, beta=0.5).loss.item() == pytest.approx(1.0)  # h = 1 + 1, and 1 / (2 beta) = 1
    assert preferences.ipo(x, beta=0.5).chosen.item() == pytest.approx(-1.0)
    assert preferences.dpo(x).margin.item() == pytest.approx(0.5)
    assert preferences.simpo(x, beta=1.0, gamma_ratio=1.0).loss.item() == pytest.approx(math.log(2))
    assert preferences.simpo(x, beta=1.0, gamma_ratio=1.0).rejected.item() == pytest.approx(-1 / 6)
    assert preferences.orpo(x, weight=0.0).chosen.item() == pytest.approx(0.5)
    assert preferences.orpo(x, weight=0.0).rejected.item() == 0
    near = Pairs(*np.array([[-2e-5], [-3 * math.log(2)], [2], [3]]))  # odds of exp(-1e-5): 1e5 - 1/2 + 1e-5 / 12; of 1/2: 1
    assert preferences.orpo(near).margin.item() == pytest.approx(math.log(1e5 - 0.5 + 1e-5 / 12), abs=1e-13)


@pytest.mark.parametrize("name", sorted(WITH_REFERENCE & set(PREFERENCES)))
@pytest.mark.parametrize("missing", ["chosen_reference", "rejected_reference"])
def test_a_missing_reference_is_named(name, missing):
    with pytest.raises(ValueError, match=f"{name} needs Pairs.{missing}"):
        PREFERENCES[name](dataclasses.replace(make(), **{missing: None}))


@pytest.mark.parametrize("name", sorted(set(PREFERENCES) - WITH_REFERENCE))
def test_the_others_need_no_reference(name):
    x = make()
    without = PREFERENCES[name](dataclasses.replace(x, chosen_reference=None, rejected_reference=None))
    np.testing.assert_array_equal(without.chosen, PREFERENCES[name](x).chosen)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("dpo", {"beta": 0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("ipo", {"beta": -1}),
        ("orpo", {"weight": -1}),
        ("simpo", {"beta": 0}),
    ],
)
def test_impossible_constants(name, constants):
    with pytest.raises(ValueError, match="expected"):
        PREFERENCES[name](make(), **constants)


# Unpaired.


def test_kto():
    rng = np.random.default_rng(3)
    logprobs, reference, desirable = rng.normal(-20, 5, 40), rng.normal(-20, 5, 40), rng.random(40) < 0.5
    c = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5, "z": 1.2}
    result = kto(logprobs, reference, desirable, **c)
    expected = [
        1.5 * (1 - 1 / (1 + math.exp(-0.3 * (h - 1.2)))) if good else 0.5 * (1 - 1 / (1 + math.exp(-0.3 * (1.2 - h))))
        for h, good in zip(logprobs - reference, desirable, strict=True)
    ]
    np.testing.assert_allclose(result.loss, expected, rtol=1e-9)
    np.testing.assert_allclose(result.reward, 0.3 * (logprobs - reference), rtol=1e-12)
    up, down = (kto(logprobs + d, reference, desirable, **c).loss for d in (1e-5, -1e-5))
    np.testing.assert_allclose(result.advantages, -(up - down) / 2e-5, rtol=1e-6, atol=1e-8)
    assert ((result.advantages > 0) == desirable).all()
    far = kto(np.array([1e5, -1e5] * 2), np.zeros(4), np.array([True, True, False, False]), z=0.0)
    np.testing.assert_array_equal(far.loss, [0, 1, 1, 0])
    np.testing.assert_array_equal(far.advantages, np.zeros(4))
    with pytest.raises(ValueError, match="expected a positive number"):
        kto(logprobs, reference, desirable, z=0.0, beta=0.0)


def test_kto_baseline_is_never_negative():
    assert kto_baseline(np.array([-1.0, -2.0]), np.array([-2.0, -4.0])) == 1.5
    assert kto_baseline(np.array([-2.0, -4.0]), np.array([-1.0, -2.0])) == 0.0
    assert kto_baseline(np.zeros(0), np.zeros(0)) == 0.0


def test_bradley_terry():
    rng = np.random.default_rng(4)
    chosen, rejected, margin = rng.normal(0, 2, (3, 30))
    length = np.ones(30, np.int64)
    result = bradley_terry(Pairs(chosen, rejected, length, length), margin=margin, centre=0.05)
    expected = [-log_sigmoid(w - r - m) + 0.05 * (w + r) ** 2 for w, r, m in zip(chosen, rejected, margin, strict=True)]
    np.testing.assert_allclose(result.loss, expected, rtol=1e-9)
    np.testing.assert_allclose(result.margin, chosen - rejected, rtol=1e-12)
    h = 1e-5
    pairs = lambda w, r: Pairs(chosen + w, rejected + r, length, length)  # noqa: E731
    loss = lambda w, r: bradley_terry(pairs(w, r), margin=margin, centre=0.05).loss  # noqa: E731
    by_chosen, by_rejected = -(loss(h, 0) - loss(-h, 0)) / (2 * h), -(loss(0, h) - loss(0, -h)) / (2 * h)
    np.testing.assert_allclose(result.chosen, by_chosen, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(result.rejected, by_rejected, rtol=1e-6, atol=1e-8)
    plain = bradley_terry(Pairs(np.array([0.0, 1e6, -1e6]), np.zeros(3), length[:3], length[:3]))
    np.testing.assert_allclose(plain.chosen, [0.5, 0, 1], atol=1e-300)


# Pairs from rollouts.


def test_pairs_of_rollouts():
    rewards = np.array([1.0, 0.5, 0.0, 0.0, 1.0, 2.0, 2.0, 3.0])
    cohorts = np.array([7, 3, 7, 7, 7, 5, 5, 9])
    chosen, rejected = pairs_of(rewards, cohorts)  # 3 and 9 have one attempt, in 5 all are equal
    assert (chosen.tolist(), rejected.tolist()) == ([0], [2])
    assert chosen.dtype == rejected.dtype == np.int64


def test_pairs_of_rollouts_match_a_loop():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        rewards, cohorts = rng.integers(0, 3, 20).astype(float), rng.integers(-2, 5, 20)
        expected = []
        for name in sorted(set(cohorts.tolist())):
            rows = [i for i in range(20) if cohorts[i] == name]
            best, worst = max(rows, key=lambda i: rewards[i]), min(rows, key=lambda i: rewards[i])  # the first of equals
            if rewards[best] > rewards[worst]:
                expected.append((best, worst))
        assert list(zip(*(side.tolist() for side in pairs_of(rewards, cohorts)), strict=True)) == expected


def test_pairs_of_nothing():
    assert [side.tolist() for side in pairs_of(np.zeros(0), np.zeros(0, np.int64))] == [[], []]


@pytest.mark.parametrize("name", [*PREFERENCES, "kto", "bradley_terry"])
def test_says_where_it_is_from_and_when_to_use_it(name):
    lines = inspect.getdoc(getattr(preferences, name)).splitlines()
    starts = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in ("Source:", "When:", "Cost:")]
    assert lines[1] == "" and starts == sorted(starts)
