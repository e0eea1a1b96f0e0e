"""Each class of a discrepancy is made on purpose, and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tidemill.core.types import Finish, Group, Sample, Score, Task, Trajectory, Version
from tidemill.observability.diagnosis.causes import Cause, Evidence, Hypothesis, diagnose
from tidemill.observability.diagnosis.mismatch import GROSS, ROUNDING, Limit, LogprobGap, lag_zero

T, START, END = 60, 20, 50
LIMIT = ROUNDING["float32"]
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (T, 30))
TOKENS = RNG.integers(0, 30, T)
MASK = (np.arange(T) >= START) & (np.arange(T) < END)


def logprobs(temperature: float = 1.0, logits: np.ndarray = LOGITS, keep: np.ndarray | None = None) -> np.ndarray:
    """[T] of TOKENS, 0 at position 0."""
    scaled = logits / temperature
    if keep is not None:
        scaled = np.where(keep, scaled, -np.inf)
    rows = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    found = rows[np.arange(T), TOKENS]
    found[0] = 0
    return found


OTHER = LOGITS + RNG.normal(0, 0.05, LOGITS.shape)
TOP = (np.argsort(np.argsort(-LOGITS, -1), -1) < 12) | (np.arange(30) == TOKENS[:, None])


def evidence(recorded: np.ndarray, mask: np.ndarray = MASK, noise: float = 1e-7) -> Evidence:
    rounded = recorded + noise * RNG.normal(size=T) * (recorded != 0)
    others = [
        Hypothesis(Cause.TEMPERATURE, "0.7", logprobs(0.7)),
        Hypothesis(Cause.STALE, "v3", logprobs(logits=OTHER)),
        Hypothesis(Cause.TRUNCATED, "support", logprobs(keep=TOP)),
    ]
    low = logprobs() + RNG.normal(0, 3e-3, T)
    return Evidence(rounded.astype(np.float32), mask, logprobs(), others, low)


def only(values: np.ndarray, where: np.ndarray = MASK) -> np.ndarray:
    return np.where(where, values, 0.0)


CASES = {
    Cause.TEMPERATURE: evidence(only(logprobs(0.7))),
    Cause.STALE: evidence(only(logprobs(logits=OTHER))),
    Cause.TRUNCATED: evidence(only(logprobs(keep=TOP))),
    Cause.DTYPE: evidence(only(logprobs() + RNG.normal(0, 2e-3, T))),
    Cause.UNKNOWN: evidence(only(logprobs() + RNG.normal(0, 1, T))),
}


@pytest.mark.parametrize("cause", CASES)
def test_what_the_caller_has_a_hypothesis_for(cause: Cause) -> None:
    finding = diagnose(CASES[cause], LIMIT)
    assert finding is not None and finding.cause is cause


@pytest.mark.parametrize(("by", "said"), [(1, "next"), (-1, "previous")])
def test_shifted_by_one(by: int, said: str) -> None:
    finding = diagnose(evidence(only(np.roll(logprobs(), -by))), LIMIT)
    assert finding is not None and finding.cause is Cause.SHIFT and said in finding.detail
    whole_record = evidence(np.roll(only(logprobs()), -by), np.roll(MASK, -by))  # mask and logprobs moved together
    finding = diagnose(whole_record, LIMIT)
    assert finding is not None and finding.cause is Cause.SHIFT


@pytest.mark.parametrize("by", [-3, -1, 1, 3])
def test_a_mask_beside_its_tokens(by: int) -> None:
    finding = diagnose(evidence(only(logprobs()), np.roll(MASK, by)), LIMIT)
    assert finding is not None and finding.cause is Cause.MASK
    assert f"{abs(by)} tokens are marked" in finding.detail and f"{abs(by)} sampled ones" in finding.detail


def test_a_mask_that_marks_too_much_or_too_little() -> None:
    more, less = MASK.copy(), MASK.copy()
    more[5:9], less[30:33] = True, False
    for mask, text in ((more, "4 tokens are marked"), (less, "3 sampled ones are not")):
        finding = diagnose(evidence(only(logprobs()), mask), LIMIT)
        assert finding is not None and finding.cause is Cause.MASK and text in finding.detail


def test_agreement_is_no_finding() -> None:
    assert diagnose(evidence(only(logprobs())), LIMIT) is None
    assert diagnose(evidence(only(logprobs()), noise=5e-3), ROUNDING["bfloat16"]) is None


def test_a_hypothesis_must_explain_far_better_than_the_record_itself() -> None:
    """Within bfloat16's wide limits nearly everything fits: the one that fits is the one that leaves much less."""
    noise = RNG.normal(0, 0.03, T)
    under_test = evidence(only(logprobs() + noise))
    for share, cause in ((0.4, Cause.UNKNOWN), (0.9, Cause.STALE)):
        under_test.others = [Hypothesis(Cause.STALE, "v3", logprobs() + share * noise)]
        finding = diagnose(under_test, Limit(2e-2, 2e-1))
        assert finding is not None and finding.cause is cause


def test_unknown_logprobs_are_left_out() -> None:
    said = np.where(MASK, logprobs(), np.nan)
    assert diagnose(Evidence(only(logprobs()), MASK, said), LIMIT) is None
    shifted = Evidence(only(np.roll(logprobs(), -1)), MASK, said)
    finding = diagnose(shifted, LIMIT)
    assert finding is not None and finding.cause is Cause.SHIFT
    joined = Evidence.joined([shifted, shifted])
    assert len(joined.said) == 2 * T and joined.gap.tokens == 2 * MASK.sum()


@pytest.mark.parametrize("dtype", GROSS)
def test_limits_are_far_from_what_was_measured_and_below_what_a_mistake_makes(dtype: str) -> None:
    measured = {"float32": (1.5e-7, 1.8e-5), "bfloat16": (2.9e-3, 3.3e-2)}[dtype]
    for limits, factor in ((ROUNDING, 5), (GROSS, 30)):
        assert limits[dtype].mean >= factor * measured[0] and limits[dtype].p99 >= factor * measured[1]
    for cause in (Cause.TEMPERATURE, Cause.UNKNOWN):
        gap = LogprobGap()
        for _ in range(4):
            gap.merge(CASES[cause].gap)
        assert GROSS[dtype].exceeded(gap), cause
    assert not GROSS[dtype].exceeded(LogprobGap())


def test_few_tokens_are_not_judged_in_low_precision() -> None:
    gap = LogprobGap()
    gap.add(np.zeros(5), np.full(5, 0.9))
    assert not GROSS["bfloat16"].exceeded(gap) and "9.0e-01" in GROSS["float32"].exceeded(gap)


def test_lag_zero_is_of_this_very_version_and_of_all_of_an_attempt() -> None:
    now, earlier = Version(4, 1, fingerprint="a"), Version(4, 0, fingerprint="a")

    def row(sample: int, *sources: Version) -> Trajectory:
        n = np.zeros(2, np.float32)
        return Trajectory(
            n.astype(np.int32), np.ones(2, bool), n, np.full(2, 4, np.int32), Finish.STOP, Score(1.0), sources, sample
        )

    rows = [row(0, now), row(1, earlier), row(2, Version(3), now), row(3, now), row(3, earlier)]  # 3: two seats
    zero = np.zeros(2, np.float32)
    samples = [
        Sample(zero.astype(np.int32), np.ones(2, bool), zero, zero.astype(np.int32), zero, zero, group=7, attempt=i)
        for i in range(4)
    ]
    assert lag_zero([Group(7, Task("t", "?"), rows)], samples, now) == [True, False, False, False]
    assert lag_zero([Group(8, Task("t", "?"), rows)], samples, now) == [False] * 4, "of a group that was not asked about"
    assert lag_zero([Group(7, Task("t", "?"), rows[::-1])], samples, now) == [True, False, False, False]
    other = replace(now, policy="critic")  # of the same step, in another seat of the first and the third attempt
    of_other = [replace(samples[i], policy="critic") for i in (0, 2)]
    seats = [Group(7, Task("t", "?"), [*rows, row(0, other), row(2, replace(other, step=3))])]
    assert lag_zero(seats, [*samples, *of_other], now, other) == [True, False, False, False, True, False]
    assert lag_zero(seats, [*samples, *of_other], now) == [True, False, False, False, False, False]
    assert lag_zero(seats, [*samples, *of_other], other) == [False, False, False, False, True, False]
