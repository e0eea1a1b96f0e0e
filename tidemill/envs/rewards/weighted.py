"""Weighted sum of several rewards of one attempt, which keeps each reward's own value.

As with TRL's `reward_funcs`, a reward that gives an attempt no score (None) does not apply, and the others count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from math import fsum

from tidemill.core.outcomes import SOLVED
from tidemill.core.types import InfraError, Outcome, Score, Unscorable

DIGITS = 12  # decimals of a sum: weights such as 0.7, 0.2 and 0.1 add up to exactly 1
TAKEN = ("mean",)  # reward/mean is the metric of the sum itself


def weighted(names: Sequence[str], weights: Sequence[float], outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of one attempt from the outcomes of its rewards.

    If one reward fails, the result is its InfraError: a sum without that term would be a wrong score (I5).
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, InfraError)]
    if failed:
        return failed[0]
    scores = [(n, w, o) for n, w, o in zip(names, weights, outcomes, strict=True) if isinstance(o, Score)]
    if not scores:
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes if isinstance(outcome, Unscorable))
        return Unscorable("; ".join(reasons))
    parts = {name: score.value for name, _, score in scores}
    parts |= {f"{name}.{part}": own for name, _, score in scores for part, own in score.parts.items()}
    rows = [[weight * turn for turn in score.turns] for _, weight, score in scores]
    try:
        value = round(fsum(weight * score.value for _, weight, score in scores), DIGITS)
        return Score(value, parts, tuple(map(fsum, zip_longest(*rows, fillvalue=0.0))))
    except (ValueError, OverflowError):  # a score or a sum beyond every float
        return InfraError(f"the weighted sum of {', '.join(name for name, _, _ in scores)} is no finite number")


def told_apart(given: Sequence[tuple[str, str]]) -> list[str]:
    """Distinct names for several rewards, given as (function, file): the file's name only if needed."""
    names = Counter(name for name, _ in given)
    longer = [f"{file}.{name}" if file and (names[name] > 1 or name in TAKEN) else name for name, file in given]
    found, seen = [], Counter[str](TAKEN)
    for name in longer:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found


def alone_enough(names: Sequence[str], weights: Sequence[float]) -> list[str]:
    """The rewards whose weight alone makes an attempt solved, if each gives 1 at most."""
    return [name for name, weight in zip(names, weights, strict=True) if weight >= SOLVED] if len(names) > 1 else []
