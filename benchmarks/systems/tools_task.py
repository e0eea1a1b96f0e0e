"""The task of `slow_tools.py`: an agent that calls a slow tool between its replies."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import string

import tidemill

MEDIAN_S, P99_S = 0.5, 12.0
REPLIES = int(os.environ.get("SLOW_TOOLS_REPLIES", "4"))  # of an episode, with a call of the tool between two of them
SCALE = float(os.environ.get("SLOW_TOOLS_SCALE", "1"))  # of the tool's latency
ALPHABET = string.ascii_letters + string.digits
_Z99 = 2.3263  # the normal distribution's 99th percentile


def latency(rng: random.Random) -> float:
    """Seconds of one call of the tool: log-normal, and at most twice the 99th percentile."""
    return SCALE * min(MEDIAN_S * math.exp(rng.gauss(0, math.log(P99_S / MEDIAN_S) / _Z99)), 2 * P99_S)


def tasks(split: str) -> list[dict[str, str]]:
    rng = random.Random(split)
    return [{"prompt": "".join(rng.choices(ALPHABET, k=16))} for _ in range(4000 if split == "train" else 8)]


@tidemill.tool
async def look_up(seconds: float) -> str:
    """Look something up.

    Args:
        seconds: How long it takes.
    """
    await asyncio.sleep(seconds)
    return "found"


_counts: dict[str, int] = {}


@tidemill.environment(tasks=tasks)
async def slow_tools(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    """Reply, call the tool, reply to its result, and so on. A new model calls nothing, so the call is made for it."""
    number = _counts[task.id] = _counts.get(task.id, -1) + 1
    rng, tools, said, waited = random.Random(f"{task.prompt} {number}"), tidemill.ToolSet([look_up]), str(task.prompt), 0.0
    for turn in range(REPLIES):
        await chat.reply(said, last=turn == REPLIES - 1)
        if turn < REPLIES - 1:
            seconds = latency(rng)
            waited += seconds
            call = {"name": "look_up", "arguments": json.dumps({"seconds": seconds})}
            said = (await tools.call({"id": str(turn), "type": "function", "function": call}))["content"]
    return tidemill.Score(rng.random(), parts={"tool_s": waited})
