"""Cause of a discrepancy between recorded logprobs and the trainer's.

    recorded logprobs, and the trainer's under each hypothesis -> the one hypothesis that explains the record

A hypothesis explains a record if it fits within rounding, and far better than the record's own claim does. Shift and
mask follow from the record's own arrays; the caller computes the logprobs under another temperature, other weights or a
truncated distribution. "dtype" needs no fit: there the difference has the size that lower precision makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tidemill.core.types import Array
from tidemill.observability.diagnosis.mismatch import Limit, LogprobGap

_BETTER = 0.5  # an explanation leaves at most this share of the mean difference
_LIKE = 4.0  # the difference that lower precision makes, times this, is still of its size


class Cause(StrEnum):
    TEMPERATURE = "temperature"
    SHIFT = "shift by one"
    MASK = "mask"
    TRUNCATED = "truncated sampling"
    STALE = "stale weights"
    DTYPE = "dtype"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The logprobs expected if `cause` were the reason; `detail` says in what way."""

    cause: Cause
    detail: str
    logprobs: Array  # [T] nats


@dataclass(slots=True)
class Evidence:
    """One trajectory, or several end to end. Logprobs are in nats, NaN where unknown."""

    recorded: Array  # [T] as the engine recorded them; 0 where it sampled nothing
    mask: Array  # [T] bool: recorded as sampled
    said: Array  # [T] the trainer's, assuming that the record is right
    others: list[Hypothesis] = field(default_factory=list)
    low: Array | None = None  # [T] like `said`, computed in lower precision

    @classmethod
    def joined(cls, parts: Sequence[Evidence]) -> Evidence:
        """Several pieces of evidence as one, without their other hypotheses."""
        recorded, mask, said = (np.concatenate([getattr(p, name) for p in parts]) for name in ("recorded", "mask", "said"))
        return cls(recorded, mask, said)

    @property
    def gap(self) -> LogprobGap:
        return gap_of(self.recorded, self.said, self.mask)

    @property
    def strays(self) -> bool:
        """True if a logprob is recorded where nothing was sampled."""
        return bool((self.recorded[~self.mask] != 0).any())


@dataclass(frozen=True, slots=True)
class Finding:
    cause: Cause
    detail: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.detail})" if self.detail else str(self.cause)


def gap_of(recorded: Array, logprobs: Array, where: Array) -> LogprobGap:
    """The gap over the tokens `where` [T] whose logprobs are known on both sides."""
    gap, known = LogprobGap(), where & np.isfinite(logprobs)
    gap.add(recorded[known], logprobs[known])
    return gap


def diagnose(evidence: Evidence, limit: Limit) -> Finding | None:
    """The cause of the discrepancy; None if there is none beyond `limit`."""
    gap = evidence.gap
    if not limit.exceeded(gap) and not evidence.strays:
        return None
    mean = gap.metrics()["logprob_gap"]
    fits = []
    for hypothesis, where in _hypotheses(evidence):
        other = gap_of(evidence.recorded, hypothesis.logprobs, where)
        left = other.metrics()["logprob_gap"]
        stray = evidence.strays and hypothesis.cause not in (Cause.MASK, Cause.SHIFT)
        if other.tokens and not stray and not limit.exceeded(other) and (left <= _BETTER * mean or evidence.strays):
            fits.append((left, Finding(hypothesis.cause, hypothesis.detail)))
    if fits:
        return min(fits, key=lambda fit: fit[0])[1]
    if evidence.low is not None and _of_its_size(gap, gap_of(evidence.low, evidence.said, evidence.mask)):
        return Finding(Cause.DTYPE, "of the size that lower precision makes")
    return Finding(Cause.UNKNOWN, "")


def _hypotheses(evidence: Evidence) -> Iterator[tuple[Hypothesis, Array]]:
    """(hypothesis, [T] bool mask of the tokens that it speaks of)."""
    for by, said in ((1, "the next"), (-1, "the previous")):
        moved = np.full(len(evidence.said), np.nan)
        if by > 0:
            moved[:-1] = evidence.said[1:]
        else:
            moved[1:] = evidence.said[:-1]
        moved[moved == 0] = np.nan  # a position that nothing predicts
        yield Hypothesis(Cause.SHIFT, f"each logprob is that of {said} token", moved), evidence.recorded != 0
    sampled = evidence.recorded != 0
    if (sampled != evidence.mask).any():
        added, missing = int((evidence.mask & ~sampled).sum()), int((sampled & ~evidence.mask).sum())
        detail = f"{added} tokens are marked that nothing was sampled for, {missing} sampled ones are not"
        yield Hypothesis(Cause.MASK, detail, evidence.said), sampled
    for other in evidence.others:
        yield other, evidence.mask


def _of_its_size(gap: LogprobGap, expected: LogprobGap) -> bool:
    found, made = gap.metrics(), expected.metrics()
    return all(found[name] <= _LIKE * made[name] for name in ("logprob_gap", "logprob_gap_p99"))
