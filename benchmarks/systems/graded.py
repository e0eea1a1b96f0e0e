"""Graded difficulty, for a model that knows nothing: say a letter one to four times. Two in three are of the longest."""

from __future__ import annotations

import itertools

LETTERS, SIGNS = "abcdef", "=:+*/?"
ALPHABET = LETTERS + SIGNS + "1234\n"
MOST = 4
PAIRS = [a + b for a, b in itertools.product(SIGNS, repeat=2)]  # before the letter, and of no meaning
HELD_OUT = PAIRS[::12]
COUNTS = {1: 2, 2: 2, 3: 3, 4: 14}  # of pairs, by level


def score(completion: str, answer: str) -> float:
    """What comes after the answer does not matter: one of 17 ** level replies is right at first."""
    return float(completion.startswith(answer))


def _rows(pairs: dict[int, list[str]]) -> list[dict[str, str]]:
    return [
        {"prompt": f"{pair}{letter}{level}", "answer": letter * level, "level": str(level)}
        for level, those in pairs.items()
        for pair in those
        for letter in LETTERS
    ]


def tasks(split: str) -> list[dict[str, str]]:
    if split == "eval":
        return _rows(dict.fromkeys(COUNTS, HELD_OUT[:1]))
    train = [pair for pair in PAIRS if pair not in HELD_OUT]
    return _rows({level: train[level::2][:count] for level, count in COUNTS.items()})
