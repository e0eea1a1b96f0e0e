"""Replies that are good or bad each by itself, as KTO learns them: its mismatched rows, and a step's advantages.

rows -> and each prompt with the next one's reply -> log(pi / pi_ref) of these, on average: z -> advantages of the rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tidemill.algorithms.advantages import Scores
from tidemill.algorithms.preferences import Unpaired, kto_baseline
from tidemill.algorithms.rows import POLICY, REFERENCE, Logprobs
from tidemill.types import Array, Metrics, Sample

GOOD = 0.5  # a score above it
_COLUMNS = ("tokens", "mask", "logprobs", "versions", "advantages", "weights")  # of a row that nobody sampled


def mismatched(rows: Sequence[Sample]) -> list[Sample]:
    """Each row's prompt with the next one's reply, and the last one's with the first's."""
    begins = [int(row.predicted.argmax()) for row in rows]
    found = []
    for row, begin, other, start in zip(rows, begins, [*rows[1:], *rows[:1]], [*begins[1:], *begins[:1]], strict=True):
        both = {name: (getattr(row, name)[:begin], getattr(other, name)[start:]) for name in _COLUMNS}
        found.append(replace(row, **{name: np.concatenate(parts) for name, parts in both.items()}))
    return found


def apart(rows: Sequence[Sample], logprobs: Logprobs, count: int) -> list[tuple[Sequence[Sample], Logprobs]]:
    """The first `count` rows with their logprobs, and the mismatched ones after them with theirs."""
    parts = slice(count), slice(count, None)
    return [(rows[part], {who: values[part] for who, values in logprobs.items()}) for part in parts]


def labelled(
    preference: Callable[..., Unpaired],
    scores: Scores,
    policy: Array,
    reference: Array | None,
    others: Sequence[Sample],
    theirs: Logprobs,
) -> tuple[Array, Metrics]:
    """Advantages [M] under one of `UNPAIRED`, and what is told. policy, reference: logprobs [M]; others: mismatched rows."""
    assert reference is not None
    starts, good = np.cumsum(scores.lengths) - scores.lengths, scores.rewards > GOOD
    pi, ref = (
        np.array([v[row.predicted].sum() for row, v in zip(others, theirs[w], strict=True)]) for w in (POLICY, REFERENCE)
    )
    z = kto_baseline(pi, ref)
    found = preference(np.add.reduceat(policy, starts), np.add.reduceat(reference, starts), good, z)
    told: Metrics = {"preference_loss": float(found.loss.mean()), "kto_baseline": z}
    told["preference_accuracy"] = float((found.margin > 0).mean())
    if good.any() and not good.all():
        told["margin"] = float(found.reward[good].mean() - found.reward[~good].mean())
    return np.repeat(found.advantages, scores.lengths), told
