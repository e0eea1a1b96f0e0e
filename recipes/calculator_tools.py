"""A calculator as two tools. The model is too small to multiply in its head, and learns to ask and to repeat the result.

    12*34=   ->  multiply(12, 34)    408    ->  408
    56+78=   ->  add(56, 78)         134    ->  134

A call is a whole reply, and its result is the next message. The warm-up learns from a demonstration of each task until some
tasks are solved; after that it is the score alone.
"""

from __future__ import annotations

import random
from itertools import product

from tidemill import Chat, Score, Task, ToolSet, environment, tool


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


def tasks(split: str) -> list[Task]:
    """A tenth of all pairs of numbers is held out."""
    pairs = list(product(range(10, 100), repeat=2))
    random.Random("calculator").shuffle(pairs)
    found = []
    for a, b in pairs[: len(pairs) // 10] if split == "eval" else pairs[len(pairs) // 10 :]:
        for sign, name, result in (("*", "multiply", a * b), ("+", "add", a + b)):
            replies = ["assistant", f"{name}({a}, {b})"], ["tool", str(result)], ["assistant", str(result)]
            shown = [{"role": role, "content": content} for role, content in replies]
            found.append(Task(f"{a}{sign}{b}=", f"{a}{sign}{b}=", {"answer": str(result), "demonstration": shown}))
    return found


def gold(demonstration: list[dict[str, str]]) -> list[str]:
    """The replies that a task's demonstration consists of."""
    return [each["content"] for each in demonstration if each["role"] == "assistant"]


@environment(tasks=tasks, gold=gold)
async def calculator(task: Task, chat: Chat) -> Score:
    """Half for the right call, all for the right answer."""
    done = await chat.work(task.prompt, TOOLS, max_turns=3, max_tokens=20)
    called = any(each.content == task.data["answer"] for each in done.results)
    answered = done.ended == "answer" and done.text == task.data["answer"]
    return Score(1.0 if answered else 0.5 * called, {"called": called, "answered": answered})
