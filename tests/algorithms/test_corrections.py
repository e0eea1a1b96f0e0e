"""Factors against loops over attempts, at golden numbers and at the edges."""

import numpy as np
import pytest

from tidemill.algorithms.corrections import CORRECTIONS, PER_TOKEN, WITHOUT_OLD, Ratios, correct, correction_by_name
from tidemill.core.import_object import constants_of


def ratios(seed=0, lengths=(3, 1, 4, 2, 6), spread=0.8):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int64)
    m = lengths.sum()
    behaviour = -rng.exponential(1.0, m)
    return Ratios(behaviour + rng.normal(0, spread, m), behaviour, rng.normal(size=m), lengths, rng.integers(0, 6, m))


def rows(x):
    """(k [T], A [T], lags [T]) of each attempt."""
    cuts = np.cumsum(x.lengths)[:-1]
    return list(zip(*(np.split(v, cuts) for v in (np.exp(x.old - x.behaviour), x.advantages, x.lags)), strict=True))


def inside(value, low, high):
    return float(low <= value <= high)


REFERENCE = {
    "tis": lambda k, a, lag, cap: [min(v, cap) for v in k],
    "tis_sequence": lambda k, a, lag, cap: [min(np.prod(k), cap)] * len(k),
    "icepop": lambda k, a, lag, low, high: [v * inside(v, low, high) for v in k],
    "mis_sequence": lambda k, a, lag, low, high: [np.prod(k) * inside(np.prod(k), low, high)] * len(k),
    "mis_geometric": lambda k, a, lag, low, high: [inside(np.prod(k) ** (1 / len(k)), low, high)] * len(k),
    "veto": lambda k, a, lag, low: [float(min(k) >= low)] * len(k),
    "opsm": lambda k, a, lag, delta: [float(not (sum(a) < 0 and -np.log(k).mean() > delta))] * len(k),
    "age": lambda k, a, lag, half_life: [0.5 ** (max(lag) / half_life)] * len(k),
}
OTHERS = {
    "tis": {"cap": 1.1},
    "tis_sequence": {"cap": 0.9},
    "icepop": {"low": 0.9, "high": 1.6},
    "mis_sequence": {"low": 0.3, "high": 3.0},
    "mis_geometric": {"low": 0.7, "high": 1.2},
    "veto": {"low": 0.4},
    "opsm": {"delta": 0.1},
    "age": {"half_life": 1.5},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", REFERENCE)
def test_matches_a_loop_over_attempts(name, seed):
    x = ratios(seed)
    for constants in (constants_of(CORRECTIONS[name]), OTHERS[name]):
        expected = np.concatenate([REFERENCE[name](*row, **constants) for row in rows(x)])
        np.testing.assert_allclose(correction_by_name(name, constants)(x), expected, rtol=1e-12)


def test_every_correction_has_a_reference():
    assert set(REFERENCE) | {"m2po"} == set(CORRECTIONS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [0.04, 0.5, 1e-9, 1e9])
def test_m2po_leaves_out_the_fewest_of_those_that_push_outwards(seed, limit):
    x = ratios(seed)
    kept = CORRECTIONS["m2po"](x, limit=limit)
    log_k = x.old - x.behaviour
    outwards = np.sign(x.advantages) == np.sign(log_k)
    assert (kept[~outwards] == 1).all() and set(kept) <= {0.0, 1.0}
    squares = np.sort(log_k[outwards] ** 2)
    best = max(n for n in range(len(squares) + 1) if n == 0 or squares[:n].mean() <= limit)
    left = np.sort(log_k[outwards & (kept == 1)] ** 2)
    np.testing.assert_allclose(left, squares[:best])


def test_m2po_treats_equals_alike():
    """Whichever of two equal tokens comes first: both stay, or both are left out."""
    log_k = np.array([0.5, 0.1, -0.3, 0.3, 0.5, -0.5])
    x = Ratios(log_k - 1, np.full(6, -1.0), np.sign(log_k) * 2, np.array([2, 4]), np.zeros(6, np.int64))
    for order in ([0, 1, 2, 3, 4, 5], [4, 5, 3, 2, 1, 0], [1, 5, 2, 0, 3, 4]):
        moved = Ratios((log_k - 1)[order], x.behaviour, x.advantages[order], x.lengths, x.lags)
        for limit, kept in ((0.07, {1, 2, 3}), (0.12, {1, 2, 3}), (0.157, set(range(6))), (0.05, {1})):
            assert {order[i] for i in np.flatnonzero(CORRECTIONS["m2po"](moved, limit=limit))} == kept, limit


@pytest.mark.parametrize("name", CORRECTIONS)
def test_factors_follow_their_attempt_and_only_per_token_ones_differ_within_it(name):
    x = ratios(7)
    factors = correction_by_name(name, {})(x)
    order = np.array([3, 0, 4, 1, 2])
    cuts = np.cumsum(x.lengths)[:-1]
    moved = Ratios(
        *(np.concatenate([np.split(v, cuts)[i] for i in order]) for v in (x.old, x.behaviour, x.advantages)),
        x.lengths[order],
        np.concatenate([np.split(x.lags, cuts)[i] for i in order]),
    )
    again = correction_by_name(name, {})(moved)
    np.testing.assert_allclose(again, np.concatenate([np.split(factors, cuts)[i] for i in order]), rtol=1e-12)
    if name not in PER_TOKEN:
        assert all(np.ptp(part) == 0 for part in np.split(factors, cuts))


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - WITHOUT_OLD))
def test_where_trainer_and_engine_agree_nothing_is_corrected(name):
    x = ratios()
    same = Ratios(x.behaviour, x.behaviour, x.advantages, x.lengths, x.lags)
    np.testing.assert_array_equal(correction_by_name(name, {})(same), np.ones(len(x.old)))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_edges(name):
    assert len(correction_by_name(name, {})(ratios(lengths=()))) == 0
    extreme = Ratios(np.array([-1e4, 0.0]), np.array([0.0, -1e4]), np.array([1.0, -1.0]), np.array([1, 1]), np.zeros(2, int))
    factors = correction_by_name(name, {})(extreme)
    assert np.isfinite(factors).all() and (factors >= 0).all()
    for constant in constants_of(CORRECTIONS[name]):
        if constant != "delta":
            with pytest.raises(ValueError, match="expected"):
                correction_by_name(name, {constant: -1.0})(ratios())


def test_corrections_multiply_and_are_reported():
    x = ratios(1)
    both = [correction_by_name("tis", {}), correction_by_name("opsm", {"delta": 0.1})]
    factors, metrics = correct(x, both)
    np.testing.assert_allclose(factors, both[0](x) * both[1](x))
    assert metrics["mean"] == pytest.approx(factors.mean()) and metrics["dropped"] == (factors == 0).mean() > 0
    assert metrics["ess"] == pytest.approx(factors.sum() ** 2 / (len(factors) * (factors**2).sum()))
    assert correct(x, [])[1]["ess"] == 1 and correct(ratios(lengths=()), both)[1] == {}


def test_a_users_correction_is_checked(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef half(x, *, by=0.5): return np.full(len(x.old), by)\ndef bad(x): return -x.advantages ** 2\n"
    )
    half, bad = (correction_by_name(f"{tmp_path / 'mine.py'}:{name}", {}) for name in ("half", "bad"))
    assert (correct(ratios(), [half])[0] == 0.5).all()
    with pytest.raises(ValueError, match="finite factors >= 0, one a token"):
        correct(ratios(), [bad])
    with pytest.raises(ValueError, match="correction 'tis' has no constant cup: it takes cap"):
        correction_by_name("tis", {"cup": 1})
    with pytest.raises(ValueError, match="did you mean 'icepop'"):
        correction_by_name("icepopp", {})
