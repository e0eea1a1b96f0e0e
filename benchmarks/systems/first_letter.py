"""A task of seconds: say the first of two letters, and nothing else. A quarter of the pairs is held out."""

from __future__ import annotations

import itertools

import tidemill

LETTERS = "abcdef"
ALPHABET = LETTERS + "=\n"
PAIRS = [a + b for a, b in itertools.product(LETTERS, repeat=2)]
HELD_OUT = {a + b for a, b in PAIRS if (LETTERS.index(a) + LETTERS.index(b)) % 4 == 0}


@tidemill.environment(
    tasks=lambda split: [{"prompt": f"{pair}="} for pair in PAIRS if (pair in HELD_OUT) == (split == "eval")]
)
async def first_letter(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """0.5 for a reply that begins with the letter, 1 for one that is the letter."""
    letter, reply = task.prompt[0], await chat.reply(task.prompt)
    return tidemill.Score(0.5 * reply.startswith(letter) + 0.5 * (reply == letter), {"begins": float(reply[:1] == letter)})
