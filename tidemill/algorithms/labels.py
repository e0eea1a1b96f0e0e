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


def mismatched(rows: Sequence[Sample]) -> list[Sample]:
    """Rows of each row's prompt with the next row's reply; the last one takes the first's."""
    begins = [int(row.predicted.argmax()) for row in rows]
    found = []
    for row, begin, other, start in zip(rows, begins, [*rows[1:], *rows[:1]], [*begins[1:], *begins[:1]], strict=True):
        both = {name: (getattr(row, name)[:begin], getattr(other, name)[start:]) for name in _COLUMNS}
        found.append(replace(row, **{name: np.concatenate(parts) for name, parts in both.items()}))
    return found


def apart(rows: Sequence[Sample], logprobs: Logprobs, count: int) -> list[Measured]:
    """[the first `count` rows with their logprobs, the mismatched rows after them with theirs]."""
    parts = slice(count), slice(count, None)
    return [(rows[part], {who: values[part] for who, values in logprobs.items()}) for part in parts]


def labelled(
    preference: Callable[..., Unpaired], scores: Scores, policy: Array, reference: Array | None, beside: Measured
) -> tuple[Array, Metrics]:
    """(advantages [M] under a preference of `UNPAIRED`, metrics).

    policy, reference: logprobs [M] of the rows. beside: the mismatched rows.
    """
    assert reference is not None
    (others, theirs), good = beside, scores.rewards > GOOD
    pi, ref = (
        np.array([v[row.predicted].sum() for row, v in zip(others, theirs[w], strict=True)]) for w in (POLICY, REFERENCE)
    )
    z = kto_baseline(pi, ref)
    found = preference(scores.per_row(policy), scores.per_row(reference), good, z)
    told: Metrics = {"preference_loss": float(found.loss.mean()), "kto_baseline": z}
    told["preference_accuracy"] = float((found.margin > 0).mean())
    if good.any() and not good.all():
        told["margin"] = float(found.reward[good].mean() - found.reward[~good].mean())
    return scores.spread(found.advantages), told
