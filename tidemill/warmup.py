"""Supervised training on the tasks' own answers, before reinforcement learning: the same trainer, engine and publication.

A model that never solves a task earns no reward to learn from. The warm-up ends at `seconds`, or as soon as greedy accuracy
on training tasks reaches `accuracy`; held-out tasks are not touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.envs.order import task_order
from tidemill.envs.template import as_messages, conversation
from tidemill.errors import ConfigError
from tidemill.evaluation import Evaluator
from tidemill.models.tokenizer import Tokenizer
from tidemill.pool import PoolPublisher
from tidemill.protocols import Trainer
from tidemill.recipe import WarmupSettings
from tidemill.types import Array, LossSpec, Sample, Task, Version

FIRST_LOOK_S = 5.0  # evaluations begin here and come at every further share of the budget:
LOOKS = 48  # accuracy goes from a tenth to two thirds within seconds
LOOK_TASKS = 128
SUPERVISED = "supervised"  # its loss

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


def supervised(rows: Sequence[Row]) -> tuple[list[Sample], dict[str, LossSpec], float]:
    """Samples, losses and scale of a cross-entropy step on `(tokens [T] int32, loss_mask [T] bool)`: a mean over tokens.

    Nothing was sampled, so `mask` is all False; only `weights` say what is trained.
    """
    samples, trained = [], 0
    for tokens, loss_mask in rows:
        tokens, loss_mask = np.asarray(tokens, np.int32), np.asarray(loss_mask, bool)
        if tokens.shape != loss_mask.shape or tokens.ndim != 1:
            raise ValueError(f"tokens {tokens.shape} and loss_mask {loss_mask.shape}: expected one flag a token")
        if loss_mask[:1].any():
            raise ValueError("loss_mask[0] is set: nothing predicts a row's first token; put a prompt or BOS before it")
        nothing = np.zeros(tokens.shape, np.float32)
        unknown = np.full(tokens.shape, -1, np.int32)
        weights = loss_mask.astype(np.float32)
        none_sampled = np.zeros(tokens.shape, bool)
        samples.append(Sample(tokens, none_sampled, nothing, unknown, nothing, weights, loss=SUPERVISED))
        trained += int(loss_mask.sum())
    return samples, {SUPERVISED: LossSpec("cross_entropy")}, 1.0 / trained if trained else 0.0


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
