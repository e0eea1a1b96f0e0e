"""The task of the reliability tests, as a user would write it: say the first letter of the prompt, and nothing else."""

from __future__ import annotations

import tidemill

LETTERS = "abcd"
ALPHABET = LETTERS + "=:\n"


def tasks(split: str) -> list[dict[str, str]]:
    mark = "=" if split == "train" else ":"
    return [{"prompt": f"{c}{d}{mark}", "answer": c} for c in LETTERS for d in LETTERS]


def score(completion: str, answer: str) -> float:
    return 0.5 * completion.startswith(answer) + 0.5 * (completion == answer)


@tidemill.environment(tasks=tasks)
async def repeat(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    return tidemill.Score(score(await chat.reply(task.prompt), task.data["answer"]))
