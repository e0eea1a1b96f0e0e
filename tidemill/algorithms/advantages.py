"""Group-relative advantages: the rewards of one prompt's siblings in, one scalar for each of them out.

A NaN reward means "no score": it takes no part in the statistics and its advantage is 0. Where the rewards that are left
cannot be told apart (one of them, or all equal) every advantage is exactly 0, never the raw reward and never rounding noise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidemill.types import Array

Advantage = Callable[[Array], Array]
"""rewards [n] float64, NaN where there is no score -> advantages [n] float64"""


def grpo(rewards: Array, eps: float = 1e-6) -> Array:
    """(R - mean) / (std + eps) with the sample standard deviation (n - 1). DeepSeekMath, 2402.03300."""
    return _over_scored(rewards, lambda r: (r - r.mean()) / (r.std(ddof=1) + eps))


def dr_grpo(rewards: Array) -> Array:
    """R - mean: no division by the spread, so that no difficulty is favoured. Dr. GRPO, 2503.20783."""
    return _over_scored(rewards, lambda r: r - r.mean())


def rloo(rewards: Array) -> Array:
    """R minus the mean of the others, which is n / (n - 1) * (R - mean). RLOO, 2402.14740."""
    return _over_scored(rewards, lambda r: (r - r.mean()) * (r.size / (r.size - 1)))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _over_scored(rewards: Array, formula: Advantage) -> Array:
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    scored = ~np.isnan(rewards)
    values = rewards[scored]
    if values.size > 1 and values.min() != values.max():  # equality, not std == 0: the std of equal floats can be 1e-17
        advantages[scored] = formula(values)
    return advantages
