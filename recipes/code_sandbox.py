"""Tasks of `code_sandbox.toml`: write a program that computes a function of which three values are told.

    "0>4 1>5 7>11=" -> "print(int(input())+4)"      "0>0 1>3 5>15=" -> "print(int(input())*3)"

A reply is run in a sandbox for numbers that the prompt does not tell, and its output compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, k: x + k,
    "*": lambda x, k: x * k,
    "-": lambda x, k: x - k,
}
HELD_OUT = 5  # one of so many tasks


def tasks(split: str) -> list[dict]:
    """Every function with many a third value; a fifth of them is held out."""
    found = []
    for sign, function in FUNCTIONS.items():
        for k in range(1, 8):
            for told in range(2, 20):
                prompt = " ".join(f"{x}>{function(x, k)}" for x in (0, 1, told)) + "="
                cases = [{"stdin": f"{x}\n", "stdout": f"{function(x, k)}\n"} for x in (11, 23)]
                found.append({"prompt": prompt, "answer": f"print(int(input()){sign}{k})", "cases": cases})
    held_out = set(random.Random("held out").sample(range(len(found)), len(found) // HELD_OUT))
    return [row for number, row in enumerate(found) if (number in held_out) is (split != "train")]
