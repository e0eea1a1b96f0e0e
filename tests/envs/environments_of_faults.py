"""Environments whose tools take their worker with them, as the task says. Loaded by path, in environment workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from tidemill import Chat, Score, Task, ToolSet, environment


def tools_of(task: Task) -> ToolSet:
    """The tools of one task: a good one, and one that does what the task says."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def fault() -> str:
        """Fail."""
        os.kill(os.getpid(), signal.Signals[task.data["signal"]])
        return "it went on"

    return ToolSet([add, fault])


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


@environment
async def by_tools(task: Task, chat: Chat) -> Any:
    """Ask once, call a good tool, then the bad one."""
    await chat.reply(task.prompt)
    tools = tools_of(task)
    await tools.call(called("add", a=1, b=2))
    with open(task.data["note"], "a") as file:
        file.write(f"{os.getpid()}\n")
    await tools.call(called("fault"))
    return Score(1.0)


@environment
async def by_gateway(task: Task, chat: Chat) -> Any:
    """Serve the chat to a client outside: the address is left in a file, and the client's answer in another one."""
    note = Path(task.data["note"])
    async with chat.serve() as model:
        whole = note.with_suffix(".new")
        whole.write_text(f"{os.getpid()} {model.url} {model.key}")
        os.replace(whole, note)
        while not note.with_suffix(".done").exists():
            await asyncio.sleep(0.005)
    return Score(1.0)
