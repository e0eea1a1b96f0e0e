"""Every advantage against the formula once more, as loops over Python floats, on ragged batches in float64."""

import dataclasses
import inspect
import itertools
import math
import statistics

import numpy as np
import pytest

from tidemill.algorithms import advantages
from tidemill.algorithms.advantages import ADVANTAGES, COMPARING, NEEDS, USING_GIVEN, Scores, advantage_by_name

CONSTANTS = {  # other than the defaults, so that a constant that is not read shows
    "grpo": {"eps": 0.1},
    "grpo_batch": {"eps": 0.1},
    "reinforce": {"baseline": 0.3},
    "reinforce_pp": {"gamma": 0.8, "eps": 0.1},
    "reinforce_pp_baseline": {"eps": 0.1},
    "gdpo": {"weights": {"b": -0.5}, "eps": 0.1},
    "pass_at_k": {"k": 2.0},
    "pkpo": {"k": 3.0},
    "gae": {"gamma": 0.9, "lam": 0.7},
    "process": {"gamma": 0.9},
    "turn_level": {"credit": 0.4, "eps": 0.1},
}
EQUAL = np.array([0.1, 1.1, 0.0, -0.7])  # 3 * 0.1 / 3 is not 0.1 in floats, nor is 7 * 1.1 / 7


def batch(seed=0, cohorts=6):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, cohorts)
    names = rng.permutation(np.repeat(rng.choice(1000, cohorts, replace=False) - 500, sizes))
    n = len(names)
    kinds = {name: rng.integers(3) for name in set(names.tolist())}  # 0/1, all equal, any number
    draws = [rng.integers(0, 2, n).astype(float), EQUAL[names % 4], rng.normal(0, 1, n)]
    lengths = rng.integers(1, 8, n)
    tokens = int(lengths.sum())
    given = np.where(rng.random(tokens) < 0.5, rng.normal(0, 1, tokens), 0.0)
    return read_only(
        Scores(
            rewards=np.array([draws[kinds[name]][i] for i, name in enumerate(names.tolist())]),
            cohorts=names,
            lengths=lengths,
            parts={"a": rng.normal(0, 3, n), "b": rng.integers(0, 2, n).astype(float), "c": EQUAL[names % 4]},
            greedy=rng.normal(0, 1, n),
            given=given,
            turns=np.concatenate([np.cumsum(rng.random(length) < 0.4) for length in lengths]),
            values=rng.normal(0, 1, tokens),
            bootstrap=np.where(rng.random(n) < 0.5, rng.normal(0, 1, n), 0.0),
            seats=rng.integers(0, 3, tokens),
            of_seats=np.where(rng.random((n, 3)) < 0.8, rng.integers(0, 3, (n, 3)), np.nan),
        )
    )


def read_only(x):
    for value in (*vars_of(x).values(), *x.parts.values()):
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return x


def vars_of(x):
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}


def single(rewards, cohorts=None, lengths=None, **more):
    """Scores with one token an attempt, of one cohort, unless said otherwise."""
    n = len(rewards)
    cohorts = np.zeros(n, np.int64) if cohorts is None else np.array(cohorts, np.int64)
    return Scores(np.array(rewards, np.float64), cohorts, np.array(lengths or [1] * n, np.int64), **more)


SEATS = np.array([[1.0, 0.0, 0.5], [0.1, 0.1, np.nan], [np.nan, np.nan, 7.0]])


def without_own(rewards, seat):
    """The seat's reward minus the mean of the others; 0 for a seat that nobody has or that is alone."""
    others = [r for i, r in enumerate(rewards.tolist()) if i != seat and not np.isnan(r)]
    return float(rewards[seat]) - statistics.fmean(others) if others and not np.isnan(rewards[seat]) else 0.0


def split(x, values):
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(x.lengths)[:-1])]


# The formulas.


def standard(values, i, eps):
    if min(values) == max(values):
        return 0.0
    return (values[i] - statistics.fmean(values)) / (statistics.stdev(values) + eps)


def among(x, values, i):
    """(the values of i's cohort, i's place among them)."""
    rows = [j for j in range(len(x.rewards)) if x.cohorts[j] == x.cohorts[i]]
    return [float(values[j]) for j in rows], rows.index(i)


def centred(x, i):
    values, place = among(x, x.rewards, i)
    return values[place] - statistics.fmean(values) if min(values) != max(values) else 0.0


def to_go(rewards, gamma=1.0):
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def whiten(rows, eps):
    flat = [v for row in rows for v in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [[(v - mean) / math.sqrt(variance + eps) for v in row] for row in rows]


def all_returns(x, gamma=1.0):
    rows = split(x, x.given)
    for row, reward in zip(rows, x.rewards.tolist(), strict=True):
        row[-1] += reward
    return [to_go(row, gamma) for row in rows]


def gae_row(rewards, values, after, gamma, lam):
    values = [*values, after]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return to_go(deltas, gamma * lam)


def gae_rows(x, gamma, lam):
    rewards, values = split(x, x.given), split(x, x.values)
    for row, reward in zip(rewards, x.rewards.tolist(), strict=True):
        row[-1] += reward
    return [gae_row(r, v, b, gamma, lam) for r, v, b in zip(rewards, values, x.bootstrap.tolist(), strict=True)]


def solved_by_hand(name, x, i, k):
    values, place = among(x, [float(r >= 1) for r in x.rewards], i)
    n, c, right = len(values), int(sum(values)), values[place]
    k = min(k, n)
    if name == "pkpo":
        return k / n * math.comb(n - c, k - 1) / math.comb(n - 1, k - 1) if right and n > 1 else 0.0
    q = 1 - math.comb(n - c, k) / math.comb(n, k)
    if q in (0, 1):
        return 0.0
    return ((1 - q) if right else (1 - q - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1))) / math.sqrt(q * (1 - q))


def turn_level_rows(x, credit, eps):
    given, turns = split(x, x.given), split(x, x.turns)
    sums = [
        {j: sum(g for g, u in zip(given[i], turns[i], strict=True) if u >= j) for j in set(turns[i])} for i in indices(x)
    ]
    rows = []
    for i in indices(x):
        outcome = standard(*among(x, x.rewards, i), eps)
        row = []
        for j in turns[i]:
            siblings = [m for m in indices(x) if x.cohorts[m] == x.cohorts[i] and j in sums[m]]
            row.append(outcome + credit * standard([sums[m][j] for m in siblings], siblings.index(i), eps))
        rows.append(row)
    return rows


def indices(x):
    return range(len(x.rewards))


def by_hand(name, x, c):
    """Lists of floats, one list a row."""
    eps, gamma = c.get("eps", 1e-6), c.get("gamma", 1.0)
    alone = lambda value: [[value(i)] * int(x.lengths[i]) for i in indices(x)]  # noqa: E731
    match name:
        case "grpo":
            return alone(lambda i: standard(*among(x, x.rewards, i), eps))
        case "grpo_batch":
            values = [centred(x, i) for i in indices(x)]
            return alone(lambda i: values[i] / (statistics.stdev(values) + eps))
        case "dr_grpo":
            return alone(lambda i: centred(x, i))
        case "rloo":
            others = lambda i: [x.rewards[j] for j in indices(x) if x.cohorts[j] == x.cohorts[i] and j != i]  # noqa: E731
            return alone(lambda i: float(x.rewards[i]) - statistics.fmean(others(i)) if others(i) else 0.0)
        case "leave_one_out_seats":
            return [[without_own(x.of_seats[i], seat) for seat in row] for i, row in enumerate(split(x, x.seats))]
        case "none":
            return alone(lambda i: 0.0)
        case "reinforce":
            return alone(lambda i: float(x.rewards[i]) - c.get("baseline", 0.0))
        case "reinforce_pp":
            return whiten(all_returns(x, gamma), c.get("eps", 1e-8))
        case "reinforce_pp_baseline":
            rows = whiten(alone(lambda i: centred(x, i)), c.get("eps", 1e-8))
            apart = [len(set(among(x, x.rewards, i)[0])) > 1 for i in indices(x)]
            return [row if told else [0.0] * len(row) for row, told in zip(rows, apart, strict=True)]
        case "remax":
            return [[g - float(x.greedy[i]) for g in row] for i, row in enumerate(all_returns(x))]
        case "maxrl":
            means = [statistics.fmean(among(x, x.rewards, i)[0]) for i in indices(x)]
            return alone(lambda i: centred(x, i) / means[i] if means[i] > 0 else 0.0)
        case "opo":

            def weighted(i):
                lengths, rewards = among(x, x.lengths, i)[0], among(x, x.rewards, i)[0]
                return sum(a * b for a, b in zip(lengths, rewards, strict=True)) / sum(lengths)

            return alone(lambda i: float(x.rewards[i]) - weighted(i))
        case "gdpo":
            eps = c.get("eps", 1e-4)
            weight = {"a": 1.0, "b": 1.0, "c": 1.0} | c.get("weights", {})
            sums = [sum(w * standard(*among(x, x.parts[p], i), eps) for p, w in weight.items()) for i in indices(x)]
            return alone(lambda i: (sums[i] - statistics.fmean(sums)) / (statistics.stdev(sums) + eps))
        case "pass_at_k" | "pkpo":
            return alone(lambda i: solved_by_hand(name, x, i, int(c.get("k", 4))))
        case "gae":
            return whiten(gae_rows(x, gamma, c.get("lam", 1.0)), 1e-8)
        case "process":
            rows = all_returns(x, gamma)
            totals = [row[0] for row in rows]
            means = [statistics.fmean(among(x, totals, i)[0]) for i in indices(x)]
            single = [len(among(x, totals, i)[0]) == 1 for i in indices(x)]
            return [[0.0 if single[i] else g - means[i] for g in row] for i, row in enumerate(rows)]
        case "turn_level":
            return turn_level_rows(x, c.get("credit", 1.0), eps)
    raise AssertionError(name)


@pytest.mark.parametrize("constants", ["defaults", "others"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_matches_the_formula(name, constants):
    c = CONSTANTS.get(name, {}) if constants == "others" else {}
    for seed in range(20):
        x = batch(seed)
        expected = [v for row in by_hand(name, x, c) for v in row]
        result = ADVANTAGES[name](x, **c)
        assert result.dtype == np.float64 and result.shape == (x.lengths.sum(),)
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_the_rows_does_not_matter(name):
    for seed in range(5):
        x = batch(seed)
        order = np.random.default_rng(seed).permutation(len(x.rewards))
        tokens = np.concatenate([np.split(np.arange(x.lengths.sum()), np.cumsum(x.lengths)[:-1])[i] for i in order])
        moved = {
            key: value[order if len(value) == len(order) else tokens] for key, value in vars_of(x).items() if key != "parts"
        }
        y = Scores(**moved, parts={part: v[order] for part, v in x.parts.items()})
        np.testing.assert_allclose(ADVANTAGES[name](y), ADVANTAGES[name](x)[tokens], rtol=1e-9, atol=1e-9)


# What must be exact.


@pytest.mark.parametrize("name", sorted(COMPARING))
@pytest.mark.parametrize("flat", [[1.0], [0.1] * 3, [1.1] * 7, [0.0] * 4, [1.0] * 6, [-0.7] * 5])
def test_rewards_that_cannot_be_told_apart_give_exactly_zero(name, flat):
    other = [0.0, 1.0, 0.0, 0.0, 0.0]  # a cohort that trains, beside
    rewards = np.array([*flat, *other])
    n = len(rewards)
    lengths = (np.arange(n) % 3) + 1
    x = Scores(
        rewards, np.arange(n) >= len(flat), lengths, {"p": rewards, "q": 3 * rewards}, turns=np.zeros(lengths.sum(), int)
    )
    result = ADVANTAGES[name](x)
    tokens = int(lengths[: len(flat)].sum())
    assert (result[:tokens] == 0).all()
    assert result[tokens:].any()
    assert (ADVANTAGES[name](dataclasses.replace(x, cohorts=np.arange(n))) == 0).all()  # cohorts of one only


@pytest.mark.parametrize("name", sorted(USING_GIVEN & COMPARING))
def test_a_cohort_of_one_gives_exactly_zero_whatever_is_given_at_its_tokens(name):
    x = single([1.0], lengths=[3], given=np.array([0.5, -1.0, 2.0]), turns=np.array([0, 1, 1]))
    assert (ADVANTAGES[name](x) == 0).all()


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - COMPARING - {"none"}))
def test_what_does_not_compare_trains_a_cohort_of_one(name):
    x = batch(1)
    alone = dataclasses.replace(x, cohorts=np.arange(len(x.rewards)))
    np.testing.assert_array_equal(ADVANTAGES[name](alone), ADVANTAGES[name](x))
    assert ADVANTAGES[name](alone).any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_attempts_give_no_advantages(name):
    none, ints = np.zeros(0), np.zeros(0, np.int64)
    x = Scores(none, ints, ints, {}, none, none, ints, none, none, ints, np.zeros((0, 1)))
    assert ADVANTAGES[name](x).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_it_says_of_given_holds(name):
    x = batch(2)
    without = ADVANTAGES[name](dataclasses.replace(x, given=None))
    np.testing.assert_array_equal(without, ADVANTAGES[name](dataclasses.replace(x, given=np.zeros(len(x.given)))))
    assert np.array_equal(without, ADVANTAGES[name](x)) == (name not in USING_GIVEN)


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_missing_is_named(name):
    x = dataclasses.replace(batch(), **{NEEDS[name]: None})
    with pytest.raises(ValueError, match=f"{name} needs Scores.{NEEDS[name]}"):
        ADVANTAGES[name](x)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - set(NEEDS)))
def test_the_others_need_nothing_but_rewards(name):
    x = batch()
    assert np.isfinite(ADVANTAGES[name](Scores(x.rewards, x.cohorts, x.lengths))).all()


# Golden cases, by hand.


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("grpo", single([0.0, 1.0]), [-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)]),
        ("dr_grpo", single([0.0, 1.0, 2.0], lengths=[2, 1, 1]), [-1, -1, 0, 1]),
        ("rloo", single([0.0, 1.0, 2.0]), [-1.5, 0, 1.5]),
        ("maxrl", single([1.0, 0.0, 0.0, 0.0]), [3, -1, -1, -1]),
        ("maxrl", single([-1.0, 0.0]), [0, 0]),
        ("opo", single([1.0, 0.0], lengths=[1, 3]), [0.75, -0.25, -0.25, -0.25]),
        ("pass_at_k", single([1.0, 0.0, 0.0, 0.0, 0.0]), [0.5, -0.125, -0.125, -0.125, -0.125]),  # f = 1/5
        ("pkpo", single([1.0, 0.5, 0.0, 0.0, 0.0]), [0.8, 0, 0, 0, 0]),
        ("reinforce", single([2.0, -1.0], lengths=[1, 2]), [2, -1, -1]),
        ("reinforce_pp", single([1.0, 0.0], lengths=[1, 2], given=np.array([0.0, 1.0, -1.0])), [1, 0, -1]),  # mean 0, var 1
        ("reinforce_pp_baseline", single([0.0, 0.5, 1.0], lengths=[1, 1, 3]), np.array([-7, -2, 3, 3, 3]) / 20**0.5),
        ("remax", single([1.0], lengths=[2], given=np.array([0.5, 0.0]), greedy=np.array([0.25])), [1.25, 0.75]),
        (  # three seats, two that draw, and one that is left alone
            "leave_one_out_seats",
            single([0.0] * 3, lengths=[4, 2, 1], seats=np.array([0, 0, 1, 2, 1, 0, 2]), of_seats=SEATS),
            [0.75, 0.75, -0.75, 0, 0, 0, 0],
        ),
        ("process", single([1.0, 0.0], lengths=[2, 1], given=np.array([1.0, 0.0, 1.0])), [0.5, -0.5, -0.5]),
    ],
)
def test_golden(name, x, expected):
    np.testing.assert_allclose(ADVANTAGES[name](x), expected, rtol=1e-7, atol=1e-12)


def test_turn_level_golden():
    """Turn 0 of both siblings: returns to go 3 and 1. Turn 1, which only the first has: nothing to compare with."""
    x = single([1.0, 0.0], lengths=[3, 1], given=np.array([1.0, 0.0, 2.0, 1.0]), turns=np.array([0, 0, 1, 0]))
    unit = 1 / 2**0.5
    result = advantages.turn_level(x, credit=2.0, eps=0.0)
    np.testing.assert_allclose(result, [3 * unit, 3 * unit, unit, -3 * unit], rtol=1e-12)
    np.testing.assert_array_equal(advantages.turn_level(x, credit=0.0), advantages.grpo(x))


def test_gdpo_of_the_reward_alone_is_as_of_one_part():
    x = batch(3)
    np.testing.assert_array_equal(
        advantages.gdpo(dataclasses.replace(x, parts={})), advantages.gdpo(dataclasses.replace(x, parts={"r": x.rewards}))
    )
    with pytest.raises(ValueError, match="weights for z: the parts of the reward are a, b, c"):
        advantages.gdpo(x, weights={"z": 1.0})


# What is expected of them.


def expectation(name, p, n, reduce, **constants):
    """Of reduce(A * d log pi / d theta) over all outcomes of n attempts, each solved with p = sigmoid(theta)."""
    total = 0.0
    for solved in itertools.product([0, 1], repeat=n):
        probability = math.prod(p if s else 1 - p for s in solved)
        a = ADVANTAGES[name](single([float(s) for s in solved]), **constants)
        total += probability * reduce([v * (1 - p if s else -p) for v, s in zip(a.tolist(), solved, strict=True)])
    return total


@pytest.mark.parametrize("p", [0.07, 0.5, 0.8])
@pytest.mark.parametrize(("n", "k"), [(2, 2), (5, 2), (5, 3), (5, 5), (6, 4), (3, 8)])
def test_pkpo_is_the_gradient_of_pass_at_k(p, n, k):
    order = min(n, k)
    gradient = order * (1 - p) ** (order - 1) * p * (1 - p)  # of 1 - (1 - p)^k
    assert expectation("pkpo", p, n, sum, k=k) == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize("p", [0.07, 0.5, 0.8])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_maxrl_is_the_gradient_of_the_truncated_log(p, n):
    gradient = sum((1 - p) ** (j - 1) for j in range(1, n)) * p * (1 - p)  # of -sum over j < n of (1 - p)^j / j
    assert expectation("maxrl", p, n, statistics.fmean) == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize("n", [2, 5])
def test_rloo_is_the_gradient_of_the_mean_reward(n):
    assert expectation("rloo", 0.3, n, statistics.fmean) == pytest.approx(0.3 * 0.7, rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_sums_to_zero(k):
    for n in range(1, 8):
        for c in range(n + 1):
            a = advantages.pass_at_k(single([1.0] * c + [0.0] * (n - c)), k=k)
            assert abs(a.sum()) < 1e-12 and np.isfinite(a).all()
            assert a.any() == (c > 0 and n - c >= min(k, n))  # neither certain to be solved by k, nor to fail


@pytest.mark.parametrize("name", ["pass_at_k", "pkpo"])
@pytest.mark.parametrize("k", [2.5, 0, -1, float("nan"), float("inf")])
def test_k_must_be_a_whole_number(name, k):
    with pytest.raises(ValueError, match="expected a whole number"):
        ADVANTAGES[name](single([1.0, 0.0]), k=k)


# A critic.


def test_gae_unwhitened_is_the_double_sum():
    x = batch(4)
    for gamma, lam in [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 1.0)]:
        expected = [v for row in gae_rows(x, gamma, lam) for v in row]
        np.testing.assert_allclose(advantages.gae(x, gamma=gamma, lam=lam, whiten=0), expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(advantages.returns(x, gamma, lam), expected + x.values, rtol=1e-9, atol=1e-9)


def test_gae_telescopes():
    """gamma = lam = 1: what is still to come, less the value; what was given before has no part in it."""
    x = single(
        [1.0], lengths=[3], given=np.array([7.0, 0.5, 0.0]), values=np.array([0.1, 0.2, 0.3]), bootstrap=np.array([2.0])
    )
    np.testing.assert_allclose(advantages.gae(x, whiten=0), [10.4, 3.3, 2.7], rtol=1e-12)
    np.testing.assert_allclose(advantages.returns(x), [10.5, 3.5, 3.0], rtol=1e-12)
    np.testing.assert_allclose(advantages.returns(dataclasses.replace(x, bootstrap=None)), [8.5, 1.5, 1.0], rtol=1e-12)
    with pytest.raises(ValueError, match=r"returns needs Scores\.values"):
        advantages.returns(dataclasses.replace(x, values=None))


def test_gae_with_a_lambda_by_length():
    x = batch(5)
    lams = [max(0.0, 1 - 1 / (0.4 * length)) for length in x.lengths.tolist()]
    assert 0.0 in lams and max(lams) > 0.6
    expected = [v for i, lam in enumerate(lams) for v in gae_rows(x, 0.9, lam)[i]]
    result = advantages.gae(x, gamma=0.9, lam=0.3, whiten=0, adaptive=0.4)
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


def test_gae_passes_a_tools_tokens_over():
    """On a row with all its tokens: before a tool's token, value and advantage of what follows are carried through. A tool's
    tokens are no part of the scores, so the sampled tokens on both sides of its answer are neighbours from the start."""
    rng = np.random.default_rng(6)
    mask = np.array([1, 1, 0, 0, 0, 1, 0, 1, 1, 0]).astype(bool)
    rewards, values, gamma, lam = np.where(mask, rng.normal(0, 1, 10), 0), rng.normal(0, 1, 10), 0.9, 0.8
    expected, value, advantage = np.zeros(10), 0.4, 0.0
    for t in reversed(range(10)):
        if mask[t]:
            advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
            value, expected[t] = values[t], advantage
    x = single([0.0], lengths=[5], given=rewards[mask], values=values[mask], bootstrap=np.array([0.4]))
    np.testing.assert_allclose(advantages.gae(x, gamma=gamma, lam=lam, whiten=0), expected[mask], rtol=1e-12)


# What goes with them.


def test_overlong():
    lengths = np.array([1, 60, 61, 80, 99, 100, 500])
    np.testing.assert_allclose(advantages.overlong(lengths, 100, 40), [0, 0, -0.025, -0.5, -0.975, -1, -1], rtol=1e-12)
    for cache in (0, 101):
        with pytest.raises(ValueError, match="expected 0 < cache <= limit"):
            advantages.overlong(lengths, 100, cache)


def test_distilled():
    np.testing.assert_allclose(advantages.distilled([-1.0, -3.0], np.array([-2.0, -0.5]), 0.5), [0.5, -1.25], rtol=1e-12)


def test_by_name(tmp_path):
    x = batch()
    np.testing.assert_array_equal(advantage_by_name("grpo", {"eps": 0.5})(x), advantages.grpo(x, eps=0.5))
    np.testing.assert_array_equal(advantage_by_name("rloo", {})(x), advantages.rloo(x))
    with pytest.raises(ValueError, match="advantage 'grop': expected one of grpo, "):
        advantage_by_name("grop", {})
    with pytest.raises(ValueError, match="advantage 'rloo' has no constant eps: it takes none"):
        advantage_by_name("rloo", {"eps": 1.0})
    own = tmp_path / "own_advantage.py"
    own.write_text("def half(x, *, factor=0.5):\n    return x.spread(factor * x.rewards)\n")
    np.testing.assert_array_equal(advantage_by_name(f"{own}:half", {"factor": 2.0})(x), np.repeat(2 * x.rewards, x.lengths))
    with pytest.raises(ValueError, match="no constant eps: it takes factor"):
        advantage_by_name(f"{own}:half", {"eps": 1.0})


@pytest.mark.parametrize("name", [*ADVANTAGES, "returns", "distilled", "overlong"])
def test_says_where_it_is_from_and_when_to_use_it(name):
    lines = inspect.getdoc(getattr(advantages, name)).splitlines()
    starts = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in ("Source:", "When:", "Cost:")]
    assert lines[1] == "" and starts == sorted(starts)
