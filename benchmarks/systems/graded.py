"""Say the letter: tasks of a model that knows nothing. A quarter of them can be learnt, the others are out of reach."""

from __future__ import annotations

import itertools

LETTERS, SIGNS = "abcdef", "=:+*/?"
ALPHABET = LETTERS + SIGNS + "\n"
PAIRS = [a + b for a, b in itertools.product(SIGNS, repeat=2)]  # before the letter, and of no meaning
HELD_OUT = PAIRS[::12]


def score(completion: str, answer: str) -> float:
    """What comes after the answer does not matter."""
    return float(completion.startswith(answer))


def tasks(split: str) -> list[dict[str, str]]:
    """Those out of reach ask for more letters than a reply may have tokens. None is held out."""
    pairs = HELD_OUT if split == "eval" else [pair for pair in PAIRS if pair not in HELD_OUT][:8]
    within = [{"prompt": f"{pair}{letter}", "answer": letter} for pair in pairs for letter in LETTERS]
    if split == "eval":
        return within
    return within + [
        {**row, "prompt": f"{row['prompt']}{sign}", "answer": row["answer"] * 3} for row in within for sign in "=:+"
    ]
