"""Supervised training on the tasks' own answers, before reinforcement learning: the same trainer, engine and publication.

A model that never solves a task earns no reward to learn from. The warm-up ends at `seconds`, or as soon as greedy accuracy
on training tasks reaches `accuracy`; held-out tasks are not touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidemill.algorithms.rows import supervised
from tidemill.config import ConfigError
from tidemill.envs.order import task_order
from tidemill.envs.template import Tokenizer, as_messages, conversation
from tidemill.evaluation import Evaluator
from tidemill.pool import PoolPublisher
from tidemill.protocols import Trainer
from tidemill.recipe import WarmupSettings
from tidemill.types import Array, Task, Version

FIRST_LOOK_S = 5.0  # evaluations begin here and come at every further share of the budget:
LOOKS = 48  # accuracy goes from a tenth to two thirds within seconds
LOOK_TASKS = 128

Row = tuple[Array, Array]  # tokens [T] int32, loss mask [T] bool


@dataclass(frozen=True, slots=True)
class WarmedUp:
    seconds: float
    steps: int
    accuracy: float  # on training tasks, at the end


async def warm_up(
    settings: WarmupSettings,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    trainer: Trainer,
    publisher: PoolPublisher,
    evaluator: Evaluator,
    seed: int,
    note: Callable[[str], None],
) -> WarmedUp:
    """Train until the goal or the end of the time. The trainer then holds the result; it has yet to be exported."""
    batches = _batches(tasks, tokenizer, settings.batch, seed)
    probe = [tasks[task_order(len(tasks), seed + 1, i)] for i in range(min(LOOK_TASKS, len(tasks)))]
    begin, step, accuracy, looks = time.monotonic(), 0, 0.0, 0
    while (spent := time.monotonic() - begin) < settings.seconds:
        samples, losses, scale = supervised(next(batches))
        await trainer.forward_backward(samples, losses)
        await trainer.apply(scale)
        step += 1
        if spent >= FIRST_LOOK_S + looks * settings.seconds / LOOKS:
            looks += 1
            accuracy = await _look(publisher, evaluator, probe, step)
            if looks % 4 == 1 or accuracy >= settings.accuracy:
                note(f"warm-up {spent:3.0f} s: accuracy {accuracy:.2f} on training tasks")
            if accuracy >= settings.accuracy:
                break
        await asyncio.sleep(0)
    return WarmedUp(time.monotonic() - begin, step, accuracy)


async def _look(publisher: PoolPublisher, evaluator: Evaluator, tasks: Sequence[Task], step: int) -> float:
    served = await publisher.publish(Version(step))
    return (await evaluator(tasks, served))["accuracy"]


def _batches(tasks: Sequence[Task], tokenizer: Tokenizer, size: int, seed: int) -> Iterator[list[Row]]:
    position = 0
    while True:
        chosen = [tasks[task_order(len(tasks), seed, position + i)] for i in range(size)]
        yield [_row(task, tokenizer) for task in chosen]
        position += size


def _row(task: Task, tokenizer: Tokenizer) -> Row:
    """Prompt, answer and end token; the loss is on the last two."""
    answer = task.data.get("answer")
    if not isinstance(answer, str):
        raise ConfigError(
            f"warm-up needs a text `answer` in each task; task {task.id} has {answer!r}: set warmup.accuracy = 0"
        )
    return conversation(tokenizer, [(as_messages(task.prompt), answer)])
