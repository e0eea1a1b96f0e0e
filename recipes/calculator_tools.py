"""A calculator as tools. "12*34+56=" needs two calls, and a model of this size cannot do it in its head.

    12*34+56=   ->  multiply(12, 34)    408    ->  add(408, 56)    464    ->  464

A call is a whole reply, and its result is the next message. The warm-up learns from a demonstration of each task until some
tasks are solved; after that it is the score alone.
"""

from __future__ import annotations

import random

from tidemill import Chat, Score, Task, ToolSet, environment, tool
from tidemill.tools.work_loop import work


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


TOOLS = ToolSet([add, multiply])
SIZES = {"train": 20_000, "eval": 1_000}


def tasks(split: str) -> list[Task]:
    draw, found = random.Random(split), dict[str, Task]()
    while len(found) < SIZES[split]:
        a, b, c = (draw.randrange(10, 100) for _ in range(3))
        if ((a + b) % 10 == 0) is (split == "train"):  # factors that are multiplied in one split are not in the other
            continue
        product, answer = a * b, str(a * b + c)
        shown = [
            {"role": "assistant", "content": f"multiply({a}, {b})"},
            {"role": "tool", "content": str(product)},
            {"role": "assistant", "content": f"add({product}, {c})"},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        name = f"{a}*{b}+{c}="
        found[name] = Task(name, name, {"answer": answer, "demonstration": shown})
    return list(found.values())


@environment(tasks=tasks)
async def calculator(task: Task, chat: Chat) -> Score:
    """A third for each needed call in its place, and all for the answer."""
    done = await work(chat, task.prompt, TOOLS, max_turns=4, max_tokens=24)
    needed = [each["content"] for each in task.data["demonstration"] if each["role"] == "tool"]
    right = sum(own.content == result for own, result in zip(done.results, needed, strict=False))
    answered = done.ended == "answer" and done.text == task.data["answer"]
    return Score(1.0 if answered else right / 3, {"calls": len(done.results), "answered": answered})
