import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.observability.diagnosis.mismatch import BIN_RATIO, LogprobGap, Mismatch

deltas = st.lists(st.floats(-15, 15, allow_subnormal=False), min_size=1, max_size=60).map(np.array)


@given(delta=deltas, cuts=st.lists(st.integers(0, 60), max_size=3), q=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
@settings(max_examples=200)
def test_matches_numpy_however_it_is_split(delta, cuts, q):
    behaviour = np.zeros_like(delta)
    total = LogprobGap()
    for part in np.split(delta, sorted(cuts)):
        piece = LogprobGap()
        piece.add(behaviour[: len(part)], part)
        total.merge(piece)
    m, w = total.metrics(), np.exp(delta)
    assert m["tokens"] == len(delta)
    assert m["logprob_gap"] == pytest.approx(np.abs(delta).mean())
    assert m["logprob_gap_max"] == np.abs(delta).max()
    assert m["kl_k1"] == pytest.approx(-delta.mean(), abs=1e-12)
    assert m["kl_k3"] == pytest.approx((w - 1 - delta).mean(), rel=1e-9, abs=1e-12)
    assert m["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    exact = np.quantile(np.abs(delta), q, method="inverted_cdf")
    assert exact * (1 - 1e-12) <= total.quantile(q) + 1e-9 and total.quantile(q) <= max(exact * BIN_RATIO * (1 + 1e-9), 1e-9)


def test_memory_does_not_grow():
    gap = LogprobGap()
    size = gap._bins.nbytes
    for _ in range(10):
        gap.add(np.zeros(10_000), np.random.default_rng(0).normal(0, 1, 10_000))
    assert gap._bins.nbytes == size < 16_384 and gap._bins.sum() == gap.tokens == 100_000


def test_lag_zero_needs_every_token_of_the_present_version():
    mismatch = Mismatch()
    mask = np.array([False, True, True, False])
    behaviour, trainer = np.zeros(4), np.array([9.0, 0.1, 0.1, 9.0])
    mismatch.add(behaviour, trainer, mask, matched=True)
    mismatch.add(behaviour, trainer * 2, mask, matched=False)
    mismatch.add(behaviour, trainer * 3, mask, matched=False)
    mismatch.add(behaviour, trainer, np.zeros(4, bool), matched=True)
    assert mismatch.matched.tokens == 2 and mismatch.lagged.tokens == 4
    metrics = mismatch.metrics()
    assert metrics["lag0/logprob_gap"] == pytest.approx(0.1) and metrics["lagged/logprob_gap"] == pytest.approx(0.25)
    other = Mismatch()
    other.merge(mismatch)
    assert other.metrics() == metrics


def test_identical_logprobs_and_none_at_all():
    gap = LogprobGap()
    assert gap.metrics()["ess"] == 1 and gap.quantile(0.99) == 0
    gap.add(np.full(5, -0.3), np.full(5, -0.3))
    assert gap.metrics()["logprob_gap_p99"] == 0 and gap.metrics()["ess"] == 1
    assert Mismatch().metrics() == {}


def test_what_is_not_finite_is_counted_and_left_out():
    gap = LogprobGap()
    gap.add(np.zeros(3), np.array([np.nan, 0.5, -np.inf]))
    assert gap.tokens == 1 and gap.not_finite == 2 and gap.metrics()["logprob_gap"] == 0.5


def test_huge_differences_do_not_overflow():
    gap = LogprobGap()
    gap.add(np.zeros(2), np.array([-800.0, 800.0]))
    assert gap.quantile(0.99) == 800 and np.isfinite(list(gap.metrics().values())).all()
