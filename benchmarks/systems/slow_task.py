"""The task of `async_gain.py`: an environment that waits, as tools do, and replies of very different lengths."""

from __future__ import annotations

import asyncio
import math
import random
import zlib

import tidemill

MEDIAN_S, P99_S, MEDIAN_TOKENS, P99_TOKENS, MOST = 0.5, 10.0, 24, 200, 220
_Z99 = 2.3263  # the normal distribution's 99th percentile


def draw(prompt: str, number: int) -> tuple[float, int]:
    """Seconds of waiting, and tokens of the reply, of a task's attempt of this number: the same in every run."""
    rng = random.Random(f"{prompt} {number}")
    latency = MEDIAN_S * math.exp(rng.gauss(0, math.log(P99_S / MEDIAN_S) / _Z99))
    tokens = MEDIAN_TOKENS * math.exp(rng.gauss(0, math.log(P99_TOKENS / MEDIAN_TOKENS) / _Z99))
    return min(latency, 2 * P99_S), max(1, min(MOST, round(tokens)))


def tasks(split: str) -> list[dict[str, str]]:
    letters = "abcdefgh"
    rng = random.Random(split)
    return [{"prompt": "".join(rng.choices(letters, k=16))} for _ in range(2000 if split == "train" else 8)]


_counts: dict[str, int] = {}


@tidemill.environment(tasks=tasks)
async def slow(task: tidemill.Task, chat: tidemill.Chat) -> tidemill.Score:
    number = _counts[task.id] = _counts.get(task.id, -1) + 1  # which of its siblings, if one process plays them all
    latency, tokens = draw(str(task.prompt), number)
    await asyncio.sleep(latency)
    reply = await chat.reply(str(task.prompt), max_tokens=tokens)
    return tidemill.Score(zlib.crc32(reply.encode()) % 1000 / 1000)
