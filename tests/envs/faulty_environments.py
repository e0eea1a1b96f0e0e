"""Environments that misbehave, each in its own way, as their task says. Loaded by path, in environment workers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tidemill import Chat, InfraError, Score, Task, Unscorable, environment
from tidemill.core.attempt_checks import check_row
from tidemill.core.types import Outcome, Trajectory


async def two_turns(task: Task, chat: Chat) -> Any:
    first = await chat.reply(task.prompt)
    second = await chat.reply([{"role": "user", "content": f"you said {first}"}], max_tokens=np.int64(5), last=True)  # type: ignore[arg-type]
    return Score(len(first) / 7, {"second": float(len(second))})


async def branches(task: Task, chat: Chat) -> Any:
    first = {"role": "user", "content": task.prompt}
    said = [{"role": "assistant", "content": (await chat.complete([first])).text}]
    more = [[first, *said, {"role": "user", "content": text}] for text in ("hello", "there", "two")]
    found = await asyncio.gather(*(chat.complete(each, max_tokens=5) for each in more))
    try:
        await chat.complete([first, *said])
    except ValueError as error:
        return Score(len("".join(each.text for each in found)) / 20, {"refused": float(len(str(error)))})


async def returns_pid(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    return os.getpid()


async def sleeps(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    time.sleep(600)


async def begins_slowly(task: Task, chat: Chat) -> Any:
    time.sleep(0.25)
    return Score(len(await chat.reply(task.prompt)))


async def spins(task: Task, chat: Chat) -> Any:
    while True:
        pass


async def exits(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    print("out of here", flush=True)
    os._exit(3)


async def segfaults(task: Task, chat: Chat) -> Any:
    ctypes.string_at(0)


async def writes_everywhere(task: Task, chat: Chat) -> Any:
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    await asyncio.sleep(600)


async def raises(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    raise KeyError("no such card")


async def sys_exits(task: Task, chat: Chat) -> Any:
    sys.exit(4)


async def gives_up(task: Task, chat: Chat) -> Any:
    raise asyncio.CancelledError


async def nan(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    return float("nan")


async def string(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    return "0.7"


async def none(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)


async def own_error(task: Task, chat: Chat) -> Any:
    return InfraError("the board is broken")


async def odd_parts(task: Task, chat: Chat) -> Any:
    return Score(1.0, {"moves": "many"})  # type: ignore[dict-item]


async def not_a_text(task: Task, chat: Chat) -> Any:
    return await chat.reply(7)  # type: ignore[arg-type]


async def not_a_count(task: Task, chat: Chat) -> Any:
    return await chat.reply("a", max_tokens="many")  # type: ignore[arg-type]


async def not_texts(task: Task, chat: Chat) -> Any:
    return await chat.reply([{"role": "user", "content": None}])  # type: ignore[dict-item]


async def not_unicode(task: Task, chat: Chat) -> Any:
    return await chat.reply("\ud800")


async def huge(task: Task, chat: Chat) -> Any:
    return await chat.reply("x" * (1 << 30))


async def huge_together(task: Task, chat: Chat) -> Any:
    return await chat.reply([{"role": "user", "content": "x" * (3 << 20)}] * 2)


async def two_at_once(task: Task, chat: Chat) -> Any:
    return await asyncio.gather(chat.reply("a"), chat.reply("b"))


async def too_long_at_once(task: Task, chat: Chat) -> Any:
    try:
        await chat.reply("long " * 500)
    except ValueError as error:
        return Unscorable(f"{type(error).__name__}: {error}")


async def fills_the_context(task: Task, chat: Chat) -> Any:
    while True:
        await chat.reply(task.prompt)


async def swallows(task: Task, chat: Chat) -> Any:
    failures = []
    for _ in range(40):
        try:
            await chat.reply(task.prompt)
        except Exception as error:
            failures.append(type(error).__name__)
    return Score(float(len(failures)), dict.fromkeys(failures, 1.0))


async def waits(task: Task, chat: Chat) -> Any:
    marks = Path(task.data["marks"])
    marks.with_suffix(".begun").touch()
    try:
        await asyncio.sleep(600)
    finally:
        marks.write_text(str(os.getpid()))


async def stubborn(task: Task, chat: Chat) -> Any:
    Path(task.data["marks"]).with_suffix(".begun").touch()
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def withdraws(task: Task, chat: Chat) -> Any:
    try:
        await asyncio.wait_for(chat.reply("slow"), 0.05)
    except TimeoutError:
        return Score(float(len(await chat.reply("quick"))))


async def dies_while_it_asks(task: Task, chat: Chat) -> Any:
    await chat.reply("quick")
    asking = asyncio.ensure_future(chat.reply("slow"))
    await asyncio.wait({asking}, timeout=0.1)
    os._exit(5)


async def forks_and_stays(task: Task, chat: Chat) -> Any:
    if os.fork() == 0:
        await asyncio.sleep(600)
    return float(len(await chat.reply(task.prompt)))


async def forks_and_speaks(task: Task, chat: Chat) -> Any:
    if os.fork() == 0:  # files of the fork's own take the places that the frames had
        files = [os.open(task.data["marks"], os.O_RDWR | os.O_CREAT) for _ in range(4)]
        await chat.reply(f"from the fork, to {files}")
    return float(len(await chat.reply(task.prompt)))


async def forks_after_the_last_reply(task: Task, chat: Chat) -> Any:
    await chat.reply(task.prompt)
    os.fork()
    return 1.0


async def leaves_processes(task: Task, chat: Chat) -> Any:
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    Path(task.data["marks"]).write_text(" ".join(str(child.pid) for child in children) + "\n")
    await asyncio.sleep(600)


async def eats_memory(task: Task, chat: Chat) -> Any:
    return len(bytearray(6 << 30))


@environment
async def faulty(task: Task, chat: Chat) -> Any:
    return await globals()[task.data["do"]](task, chat)


class Judged:
    """An environment of its own class, which judges a group's attempts together. Where it does so, it says."""

    name = "judged"

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{n}", f"say {n}") for n in range(4)]

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        await chat.reply(task.prompt)
        while task.prompt == "fill the context":
            await chat.reply(task.prompt)
        return None

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        if task.prompt == "raise":
            raise LookupError("no rule")
        if task.prompt == "sleep":
            time.sleep(600)
        for attempt in attempts:
            check_row(attempt)
        total = sum(int(attempt.tokens.sum()) + float(attempt.logprobs.sum()) for attempt in attempts)
        return [Score(total, {"pid": os.getpid()}) for _ in attempts]

    async def close(self) -> None:
        return None


judged = Judged()
