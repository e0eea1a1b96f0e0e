"""KTO's learning from single replies that are labelled good or bad.

The rows, and each prompt paired with the next one's reply -> mean log(pi / pi_ref) of the mismatched pairs, z ->
advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tidemill.algorithms.advantages import Scores
from tidemill.algorithms.preferences import Unpaired, kto_baseline
from tidemill.algorithms.token_rows import POLICY, REFERENCE, Logprobs, Measured
from tidemill.core.types import Array, Metrics, Sample

GOOD = 0.5  # a reply with a higher score is good
_COLUMNS = (
    "tokens",
    "mask",
    "logprobs",
    "versions",
    "advantages",
    "weights",
)  # arrays of a row; the others are about sampling


def mismatched(attempts: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Rows of each attempt's prompt with the next attempt's replies; the last one takes the first's."""
    return [_after(own[0], other) for own, other in zip(attempts, [*attempts[1:], *attempts[:1]], strict=True)]


def _after(own: Sample, attempt: Sequence[Sample]) -> list[Sample]:
    """The rows of an attempt after the prompt of another one. A row with another prompt than the first row loses that."""
    begin, start, prompt = int(own.predicted.argmax()), int(attempt[0].predicted.argmax()), attempt[0].tokens
    found = []
    for row in attempt:
        cut = start if np.array_equal(row.tokens[:start], prompt[:start]) else int(row.predicted.argmax())
        both = {name: (getattr(own, name)[:begin], getattr(row, name)[cut:]) for name in _COLUMNS}
        found.append(replace(own, **{name: np.concatenate(parts) for name, parts in both.items()}, extras={}))
    return found


def apart(rows: Sequence[Sample], logprobs: Logprobs, count: int) -> list[Measured]:
    """[the first `count` rows with their logprobs, the mismatched rows after them with theirs]."""
    parts = slice(count), slice(count, None)
    return [(rows[part], {who: values[part] for who, values in logprobs.items()}) for part in parts]


def labelled(
    preference: Callable[..., Unpaired],
    scores: Scores,
    policy: Array,
    reference: Array | None,
    beside: tuple[Sequence[Sample], Logprobs, Array],
) -> tuple[Array, Metrics]:
    """(advantages [M] under a preference of `UNPAIRED`, metrics).

    policy, reference: logprobs [M] of the rows. beside: the mismatched rows, their logprobs, and how many of them belong to
    each attempt.
    """
    assert reference is not None
    (others, theirs, counts), good = beside, scores.rewards > GOOD
    starts = np.cumsum(counts) - counts
    pi, ref = (
        np.add.reduceat([v[row.predicted].sum(dtype=np.float64) for row, v in zip(others, theirs[who], strict=True)], starts)
        for who in (POLICY, REFERENCE)
    )
    z = kto_baseline(pi, ref)
    found = preference(scores.per_attempt(policy), scores.per_attempt(reference), good, z)
    told: Metrics = {"preference_loss": float(found.loss.mean()), "kto_baseline": z}
    told["preference_accuracy"] = float((found.margin > 0).mean())
    if good.any() and not good.all():
        told["margin"] = float(found.reward[good].mean() - found.reward[~good].mean())
    return scores.spread(found.advantages), told
