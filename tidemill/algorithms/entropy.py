"""Adaptive entropy control: the entropy weight of the next step."""

from __future__ import annotations


def adaptive_entropy(coefficient: float, measured: float, *, target: float, change: float = 0.005) -> float:
    """The next step's c: c + change where the entropy is below target, else max(0, c - change).

    In its own step, c is the weight of the term `entropy` if the entropy is at most target; above it, the weight is 0.

    Source: adaptive entropy control, Skywork-OR1, 2505.22312, from c = 0 with target 0.2 and change 0.005; it states no
    bound at 0. The measured entropy is the mean of -log mu over the sampled tokens of the step, known before its
    gradient: an unbiased estimate of the entropy of the sampled distribution.
    When: exploration is not to end, and no constant weight is right from the first step to the last.
    Cost: nothing.
    """
    return max(0.0, coefficient + (change if measured < target else -change))
