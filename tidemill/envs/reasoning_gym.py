"""reasoning-gym datasets as environments, judged by the dataset's own scorer.

The package is never imported in this process: a process of its own makes the tasks (see `reasoning_gym_worker`), and
reward workers judge the replies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from typing import Any

import msgspec

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Gold
from tidemill.core.types import InfraError, Outcome, Score, Task, Trajectory, Unscorable
from tidemill.envs.environment import SingleTurn
from tidemill.envs.environment_settings import ReasoningGymSettings
from tidemill.envs.reward_workers.reward_pool import RewardPool

MAKING_LIMIT_S = 600.0
_DRAWS = 3  # at most so many entries are drawn for each task: small datasets repeat themselves
_WORKER = "tidemill.envs.reasoning_gym_worker"


def reasoning_gym(settings: ReasoningGymSettings, pool: RewardPool) -> SingleTurn:
    """The environment of one dataset. Raises ConfigError when package, dataset or arguments are not there."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("env kind 'reasoning_gym' needs a package that is not installed: pip install 'tidemill[gym]'")
    made = _make(settings)
    splits = {split: [_task(settings, *entry) for entry in made[split]] for split in ("train", "eval")}
    return SingleTurn(f"reasoning_gym:{settings.dataset}", splits, GymJudge(settings, pool))


class GymJudge:
    """Judge that calls the dataset's scorer once per group; if that fails, once for each attempt."""

    def __init__(self, settings: ReasoningGymSettings, pool: RewardPool) -> None:
        self._pool, self._name, self._binary = pool, settings.dataset, settings.binary
        self._fixed = settings.model_dump(include={"dataset", "args", "seed", "answer_tag"}) | {"length": _length(settings)}

    async def __call__(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        texts = [attempt.text for attempt in attempts]
        outcomes = await self._judged(task, texts)
        if len(texts) > 1 and all(isinstance(outcome, InfraError) for outcome in outcomes):
            alone = await asyncio.gather(*(self._judged(task, [text]) for text in texts))
            outcomes = [outcome for (outcome,) in alone]
        return [_all_or_nothing(outcome) for outcome in outcomes] if self._binary else outcomes

    grouped = False

    def gold(self, task: Task) -> Gold:
        answer = task.data["answer"]
        if answer is None:
            return Unscorable(f"{self._name} names no answer for it")
        tag = self._fixed["answer_tag"]
        return f"<{tag}>{answer}</{tag}>" if tag else answer

    async def _judged(self, task: Task, texts: list[str]) -> list[Outcome]:
        about = {"index": task.data["index"], "question": task.data["question"]}
        kwargs = {"completions": texts, **self._fixed, **about}
        return await self._pool.call_group(f"{_WORKER}:score", len(texts), kwargs=kwargs, name=self._name)


def _length(settings: ReasoningGymSettings) -> int:
    return _DRAWS * (settings.size + settings.eval_size) + 100


def _all_or_nothing(outcome: Outcome) -> Outcome:
    return Score(float(outcome.value >= 1.0), {"partial": outcome.value}) if isinstance(outcome, Score) else outcome


def _task(settings: ReasoningGymSettings, index: int, question: str, answer: str | None) -> Task:
    name = f"{settings.dataset}/{settings.seed}/{index}"
    data = {"index": index, "question": question, "answer": answer}
    return Task(name, settings.template.replace("{question}", question), data)


def _make(settings: ReasoningGymSettings) -> dict[str, list[tuple[int, str, str | None]]]:
    order = settings.model_dump(include={"dataset", "args", "seed", "size", "eval_size"}) | {"length": _length(settings)}
    command = [sys.executable, "-m", _WORKER]
    try:
        done = subprocess.run(
            command,
            input=msgspec.msgpack.encode(order),
            capture_output=True,
            timeout=MAKING_LIMIT_S,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"reasoning-gym's {settings.dataset} made no {settings.size} + {settings.eval_size} tasks "
            f"within {MAKING_LIMIT_S:g} s: lower env.size"
        ) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise ConfigError(f"reasoning-gym's {settings.dataset} failed to make tasks with args={settings.args!r}: {last}")
    reply: dict[str, Any] = msgspec.msgpack.decode(done.stdout)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return reply
