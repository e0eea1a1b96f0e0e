"""A task of seconds: say the first of two letters, and nothing else. A quarter of the pairs is held out."""

from __future__ import annotations

import itertools

import tidemill

LETTERS = "abcdef"
ALPHABET = LETTERS + "=\n"
PAIRS = [a + b for a, b in itertools.product(LETTERS, repeat=2)]
HELD_OUT = {a + b for a, b in PAIRS if (LETTERS.index(a) + LETTERS.index(b)) % 4 == 0}


def split_of(split: str) -> list[str]:
    return [pair for pair in PAIRS if (pair in HELD_OUT) == (split == "eval")]


@tidemill.environment(tasks=lambda split: [{"prompt": f"{pair}=", "answer": pair[0]} for pair in split_of(split)])
async def first_letter(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """0.5 for a reply that begins with the letter, 1 for one that is the letter."""
    reply = await chat.reply(task.prompt)
    return tidemill.Score(
        judge(reply, task.prompt), {"begins": float(reply[:1] == task.prompt[0]), "whole": float(reply == task.prompt[0])}
    )


def judge(completion: str, prompt: str) -> float:
    """The same, for rows."""
    return 0.5 * completion.startswith(prompt[0]) + 0.5 * (completion == prompt[0])
