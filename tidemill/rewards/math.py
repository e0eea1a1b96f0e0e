"""Mathematical equivalence by math-verify. Imported only where it can be killed: in a scoring worker.

A symbolic comparison may run for ever or take all memory, so its own time-outs are off (they answer "wrong" where
the truth is "not judged") and the worker's limit ends it: an InfraError, not a zero.
"""

from __future__ import annotations

from math_verify import parse, verify

from tidemill.rewards.functions import boxed


def score(completion: str, answer: str) -> float | None:
    """1.0 when the completion's final expression equals the answer; None when the answer cannot be read."""
    marked = any(mark in answer for mark in ("$", "\\(", "\\[")) or boxed(answer) is not None
    gold = parse(answer if marked else f"\\boxed{{{answer}}}", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        return None
    given = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
    return float(verify(gold, given, timeout_seconds=None))
