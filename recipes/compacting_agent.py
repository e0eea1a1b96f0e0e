"""An agent that keeps its own history and shortens it. It has to remember the first digit that it was told.

    "36=" -> "3"   "2=" -> "3"   "4=" -> "3"      the whole conversation is sent each time
    "36=" -> "3"   "35=" -> "3"  ...              then its latest answer is all that is left of the digits since

Each of these conversations is a branch of one attempt, and all are trained with its score.
"""

from __future__ import annotations

import random

from tidemill import Chat, Score, Task, environment

DIGITS = "0123456"
TOLD = 9  # digits after the first note
KEPT = 3  # answers after which the history is compacted


def tasks(split: str) -> list[Task]:
    draw, found = random.Random(split), []
    for number in range(400 if split == "train" else 100):
        note, *told = (draw.choice(DIGITS) for _ in range(1 + TOLD))
        data = {"note": note, "told": "".join(told), "answer": note}
        found.append(Task(f"{split}-{number}", f"{note}{told[0]}=", data))
    return found


@environment(tasks=tasks)
async def remembered(task: Task, chat: Chat) -> Score:
    note, right, history = task.data["note"], 0, []
    for place, digit in enumerate(task.data["told"]):
        if place and place % KEPT == 0:  # the first exchange stays, and its latest answer stands for all others
            history = [*history[:2], {"role": "user", "content": f"{note}{digit}="}]
        else:
            history.append({"role": "user", "content": f"{digit}=" if place else task.prompt})
        note = (await chat.complete(history, max_tokens=3)).text
        history.append({"role": "assistant", "content": note})
        right += note == task.data["answer"]
    return Score(right / TOLD)
