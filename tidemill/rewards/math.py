"""Mathematical equivalence by math-verify. Imported only where it can be killed: in a scoring worker.

A symbolic comparison may run for ever or take all memory, so its own time-outs are off (they answer "wrong" where
the truth is "not judged") and the worker's limit ends it: an InfraError, not a zero.
"""

from __future__ import annotations

from math_verify import parse, verify

from tidemill.rewards.functions import boxed, missing


def score(completion: str, answer: object) -> float | None:
    """1.0 when the completion's final expression equals the answer; None when the answer cannot be read."""
    if missing(answer):
        return None
    gold_text = str(answer)
    marked = any(mark in gold_text for mark in ("$", "\\(", "\\[")) or boxed(gold_text) is not None
    gold = parse(gold_text if marked else f"\\boxed{{{gold_text}}}", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        return None
    given = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
    return float(verify(gold, given, timeout_seconds=None))
