"""How the weight of the entropy follows what is measured: state of a run, and a function of what its steps recorded."""

from __future__ import annotations


def adaptive_entropy(coefficient: float, measured: float, *, target: float, change: float = 0.005) -> float:
    """The next step's c: c + change where the entropy is below target, else c - change, at least 0. In its own step c is the
    weight of the term `entropy` where the entropy is at most target, and 0 where it is above.

    Source: adaptive entropy control, Skywork-OR1, 2505.22312, from c = 0 with target 0.2 and change 0.005; no bound at 0 is
    stated there. What is measured is the mean of -log mu over the sampled tokens of the step, known before its gradient:
    the entropy of what was sampled from, without bias.
    When: exploration is not to end, and no constant weight is right from the first step to the last.
    Cost: nothing.
    """
    return max(0.0, coefficient + (change if measured < target else -change))
