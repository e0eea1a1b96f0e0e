"""Guessing game, a multi-turn example: find a number within a range.

    guess 1-16        the policy answers with a number
    higher            ... too low: it answers again
    lower             ... too high

The sooner the number is found, the higher the score: 1 at the first guess, less in equal steps, 0 when it is not found.
All text is lower-case letters, digits, spaces, newlines and "-", so a character tokenizer of 40 tokens is enough.
"""

from __future__ import annotations

import random
import re

from tidemill.core.chat_interface import Chat
from tidemill.core.seeding import derive_seed
from tidemill.core.types import Score, Task
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.environment_settings import GuessSettings

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz -\n"


async def guess(task: Task, chat: Chat) -> Score:
    """Play one game; the score is 1 - turn / turns at the right guess."""
    number, turns = task.data["number"], task.data["turns"]
    message = task.prompt
    for turn in range(turns):
        said = re.search(r"\d{1,9}", await chat.reply(message, last=turn == turns - 1))
        if said is None:
            message = "a number"
        elif int(said[0]) == number:
            return Score(1.0 - turn / turns, {"found": 1.0, "guesses": turn + 1.0})
        else:
            message = "higher" if int(said[0]) < number else "lower"
    return Score(0.0, {"found": 0.0, "guesses": float(turns)})


def guess_game(settings: GuessSettings) -> FunctionEnvironment:
    """The environment of the game: all (range of two or more, number) within low..high, shuffled."""
    low, high = settings.low, settings.high
    games = [(a, b, n) for a in range(low, high) for b in range(a + 1, high + 1) for n in range(a, b + 1)]
    draw = random.Random(derive_seed(settings.seed, "guess"))
    keys = [draw.random() for _ in games]
    games = [games[i] for i in sorted(range(len(games)), key=keys.__getitem__)]
    held_out = min(settings.eval_size, max(1, len(games) // 4))
    tasks = {
        "eval": [_task(settings, *game) for game in games[:held_out]],
        "train": [_task(settings, *game) for game in games[held_out : held_out + settings.size]],
    }
    return FunctionEnvironment(guess, tasks.__getitem__, gold=lambda number: str(number))


def _task(settings: GuessSettings, low: int, high: int, number: int) -> Task:
    return Task(f"guess/{low}-{high}/{number}", f"guess {low}-{high}", {"number": number, "turns": settings.turns})
