"""Reductions: the weights of samples and the scale by which token terms are averaged (I6).

    gradient = scale * sum over samples i of weight_i * sum over its trained tokens t of grad term_it

Denominators are those of the whole optimizer step. They count the tokens that the loss was asked for, before a clip or a
correction drops any: a dropped token has a zero gradient and does not make the others heavier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidemill.core.types import Array

Division = tuple[Array | int, int]
"""(divisor of each sample's sum over tokens, [n] or one number; divisor of the sum over samples)"""


def token(lengths: Array, groups: Array, length: int | None) -> Division:
    """sum over all tokens / their number.

    Source: DAPO, 2503.14476, as in its authors' code.
    When: every token is to weigh the same: a long attempt weighs more than a short one.
    Cost: nothing.
    """
    return 1, int(lengths.sum())


def sequence(lengths: Array, groups: Array, length: int | None) -> Division:
    """mean over attempts of (sum over its tokens / |y|).

    Source: GRPO, DeepSeekMath, 2402.03300.
    When: every attempt is to weigh the same: a token of a long one weighs less, also where it is to be pushed down.
    Cost: nothing.
    """
    return np.maximum(lengths, 1), int(np.count_nonzero(lengths))


def prompt(lengths: Array, groups: Array, length: int | None) -> Division:
    """mean over prompts of (sum over the tokens of its attempts / their number).

    Source: the objective printed in DAPO, 2503.14476; ScaleRL, 2510.13786.
    When: every prompt is to weigh the same, however long its answers are.
    Cost: nothing.
    """
    index = np.unique(groups, return_inverse=True)[1]
    tokens = np.bincount(index, weights=lengths)
    return np.maximum(tokens, 1)[index], int(np.count_nonzero(tokens))


def attempt(lengths: Array, groups: Array, length: int | None) -> Division:
    """mean over attempts of the sum over its tokens.

    Source: REINFORCE, Williams 1992, on whole attempts.
    When: the gradient of the mean reward itself, or of a preference; it grows with the length of the answers.
    Cost: nothing.
    """
    return 1, int(np.count_nonzero(lengths))


def fixed(lengths: Array, groups: Array, length: int | None) -> Division:
    """sum over all tokens / (attempts * fixed_length).

    Source: Dr. GRPO, 2503.20783; fixed_length is the longest completion unless it is set.
    When: as attempt, divided by a constant: no length is favoured, and the gradient is of the size of a token's.
    Cost: nothing.
    """
    if length is None or length < 1:
        raise ValueError(f"reduction 'fixed' with length {length!r}: expected a positive number of tokens")
    return 1, int(np.count_nonzero(lengths)) * length


REDUCTIONS: dict[str, Callable[[Array, Array, int | None], Division]] = {
    f.__name__: f for f in (token, sequence, prompt, attempt, fixed)
}


def reduction(kind: str, lengths: Array, groups: Array, fixed: int | None = None) -> tuple[Array, float]:
    """(weights [n] float64, scale) of n samples.

    lengths [n]: trained tokens of each sample. groups [n]: prompt ids. kind: see REDUCTIONS. fixed: the constant length
    of "fixed". Samples without a trained token count in no denominator; a step without any has scale 0.
    """
    lengths, groups = np.asarray(lengths, np.int64), np.asarray(groups)
    if lengths.shape != groups.shape or lengths.ndim != 1:
        raise ValueError(f"lengths {lengths.shape} and groups {groups.shape}: expected one number a sample in each")
    if kind not in REDUCTIONS:
        raise ValueError(f"reduction {kind!r}: expected one of {', '.join(REDUCTIONS)}")
    divisors, count = REDUCTIONS[kind](lengths, groups, fixed)
    return (lengths > 0) / divisors, 1.0 / float(count) if count else 0.0
