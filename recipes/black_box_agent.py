"""An agent that is a program of its own: it knows OpenAI's client, and nothing of Tidemill.

It looks for the largest of a row of digits, and asks the policy about two at a time:

    "37=" -> "7"   "72=" -> "7"

One process plays all episodes, many at a time: a line on its input is a task with an address and a key, and a line on its
output is the score. `env = {kind = "agent", command = "python black_box_agent.py", lifetime = "run", ...}`
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from typing import Any

DIGITS, LENGTH = "0123456", 4


def tasks(split: str) -> list[dict[str, Any]]:
    """Rows of digits. The prompt is what the agent asks first; the warm-up teaches to say a digit, the first one."""
    rows = ["".join(row) for row in itertools.product(DIGITS, repeat=LENGTH)]
    random.Random(0).shuffle(rows)
    rows = rows[:400] if split == "train" else rows[400:500]
    return [{"prompt": f"{row[:2]}=", "answer": row[0], "row": row} for row in rows]


async def play(client: Any, task: dict[str, Any]) -> None:
    model = client.with_options(base_url=task["base_url"], api_key=task["api_key"])
    row, right = task["data"]["row"], 0.0
    best = row[0]
    for place in range(1, LENGTH):
        question = [{"role": "user", "content": f"{best}{row[place]}="}]
        reply = await model.chat.completions.create(model=task["model"], messages=question)
        said = reply.choices[0].message.content
        best = max(best, row[place])
        right += 1.0 if said == best else 0.3 * said.startswith(best)  # it said more than the digit
    print(json.dumps({"id": task["id"], "score": right / (LENGTH - 1)}), flush=True)


async def play_or_tell(client: Any, task: dict[str, Any]) -> None:
    try:
        await play(client, task)
    except Exception as error:
        print(json.dumps({"id": task["id"], "score": None, "reason": f"{type(error).__name__}: {error}"}), flush=True)


async def main() -> None:
    from openai import AsyncOpenAI

    playing, client = set[asyncio.Task[None]](), AsyncOpenAI(base_url="http://localhost", api_key="of each task")
    while line := await asyncio.to_thread(sys.stdin.readline):
        playing.add(one := asyncio.create_task(play_or_tell(client, json.loads(line))))
        one.add_done_callback(playing.discard)


if __name__ == "__main__":
    asyncio.run(main())
