"""Amounts in words: a number and its noun, such as "1 call" and "2,000 replies"."""

from __future__ import annotations


def amount(count: int, noun: str) -> str:
    """The number with its noun, which is given in the singular."""
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {plural}"
