"""Warm-up: supervised training on the tasks' own answers before RL.

A model that never solves a task earns no reward to learn from. The warm-up ends as soon as greedy accuracy on training tasks
reaches `accuracy`, and fails if that takes more than `steps`. Held-out tasks are not touched. Accuracy is measured every few
steps, never by the clock, so the result does not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.engine_pool import PoolPublisher
from tidemill.controller.evaluation import Evaluator, Unscored
from tidemill.core.errors import ConfigError, RunFailed
from tidemill.core.interfaces import Trainer
from tidemill.core.task_places import named
from tidemill.core.types import Array, LossSpec, Sample, Task, Version
from tidemill.envs.curriculum import task_order
from tidemill.models.chat_template import Messages, Turn, as_messages, is_message
from tidemill.models.conversations import conversation, unknown_token
from tidemill.models.tokenizer import Tokenizer
from tidemill.run.recipe_tables import WarmupSettings

LOOK_EVERY = 10  # steps between two measurements of accuracy, which can rise from 0.1 to 0.67 within fifty
LOOK_TASKS = 256
MOST_TOLD = 5  # reasons for a missing score
TELL_S = 4.0  # between two lines of progress
SAVE_S, SAVE_SHARE = 3.0, 10  # seconds between two checkpoints, and at least this many times the duration of the last one
SUPERVISED = "supervised"  # name of its loss

Row = tuple[Array, Array]  # tokens [T] int32, loss mask [T] bool
Save = Callable[[int], Awaitable[Coroutine[Any, Any, None]]]  # steps done -> writer of the copied state


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The result of a warm-up."""

    seconds: float  # in the process that finished it
    steps: int
    accuracy: float  # on training tasks, at the end


@dataclass(slots=True)
class WarmUp:
    """A warm-up, begun or taken up again. Its result depends on steps alone."""

    settings: WarmupSettings
    tasks: Sequence[Task]
    tokenizer: Tokenizer
    trainer: Trainer
    publisher: PoolPublisher
    evaluator: Evaluator
    seed: int
    note: Callable[[str], None]
    turns: DeviceTurns = field(default_factory=DeviceTurns)
    save: Save | None = None  # None: no checkpoints
    step: int = 0  # steps done
    accuracy: float | None = None  # the latest measured in this process
    _begin: float = field(default_factory=lambda: time.monotonic())
    _told: float = field(default_factory=lambda: time.monotonic())
    _save_at: float = field(default_factory=lambda: time.monotonic() + SAVE_S)
    _saving: asyncio.Task[None] | None = None

    async def run(self) -> WarmedUp:
        """Train until the target is reached. Raises RunFailed at the limit of steps."""
        batches, probe = _batches(self.tasks, self.tokenizer, self.settings.batch, self.seed, self.step), self._probe()
        await self.turns.trainer()
        async with asyncio.TaskGroup() as group:
            while not await self._reached(probe):
                samples, losses, scale = supervised(next(batches))
                await self.trainer.forward_backward(samples, losses)
                await self.trainer.apply(scale)
                self.step += 1
                self._tell()
                await self._save(group)
                await asyncio.sleep(0)
        self._tell(always=True)
        return WarmedUp(time.monotonic() - self._begin, self.step, self.accuracy or 0.0)

    async def _reached(self, probe: Sequence[Task]) -> bool:
        """Measure the accuracy if it is time to, and return True at the target."""
        last = self.step >= self.settings.steps
        if self.step % LOOK_EVERY and not last:
            return False
        served = await self.publisher.publish(Version(self.step))
        async with self.turns.lent():
            self.accuracy = accuracy = (await self.evaluator(probe, [served]))["accuracy"]
        if last and accuracy < self.settings.accuracy:
            raise RunFailed(self._why_failed(accuracy))
        return accuracy >= self.settings.accuracy

    async def _save(self, group: asyncio.TaskGroup) -> None:
        """Begin a checkpoint if the previous one is done and it costs at most a tenth of the time."""
        begin, over = time.monotonic(), self._saving is None or self._saving.done()
        if self.save is not None and over and begin >= self._save_at:
            self._saving = group.create_task(await self.save(self.step))
            self._saving.add_done_callback(lambda _: self._saved(begin))

    def _saved(self, begin: float) -> None:
        now = time.monotonic()
        self._save_at = now + max(SAVE_S, SAVE_SHARE * (now - begin))

    def _probe(self) -> list[Task]:
        """The training tasks on which accuracy is measured, always the same ones."""
        count = min(LOOK_TASKS, len(self.tasks))
        return [self.tasks[task_order(len(self.tasks), self.seed + 1, i)] for i in range(count)]

    def _tell(self, always: bool = False) -> None:
        """Note the progress, every few seconds."""
        if always or time.monotonic() - self._told >= TELL_S:
            self._told, goal = time.monotonic(), self.settings
            found = "not looked at yet" if self.accuracy is None else f"{self.accuracy:.2f}"
            self.note(
                f"warm-up: step {self.step:,}, accuracy {found} (ends at {goal.accuracy:.2f}, or {goal.steps:,} steps)"
            )

    def _why_failed(self, accuracy: float) -> str:
        goal, also = self.settings, ""
        if accuracy == 0:
            also = "; `tidemill reward test RECIPE` says whether the tasks' own answers earn the full score at all"
        return (
            f"the warm-up reached accuracy {accuracy:.2f} on training tasks in {self.step:,} steps, and "
            f"warmup.accuracy = {goal.accuracy:g} was expected: give more warmup.steps, and the same command goes on from "
            f"its last checkpoint; or another warmup.lr (now {goal.lr:g}), easier tasks or a lower warmup.accuracy{also}"
        )


def failures_noted(note: Callable[[str], None]) -> Callable[[Unscored], None]:
    """A note on the attempts without a score after each measurement: each reason once, the first MOST_TOLD of them."""
    told = set[str]()

    def tell(found: Unscored) -> None:
        for reason, count in found.reasons.most_common():
            if reason not in told and len(told) < MOST_TOLD:
                told.add(reason)
                note(f"warm-up: {count:,} of {found.attempts:,} attempts have no score and count as not solved: {reason}")

    return tell


def supervised(rows: Sequence[Row]) -> tuple[list[Sample], dict[str, LossSpec], float]:
    """Samples, losses and scale of a cross-entropy step: the mean over trained tokens.

    rows: (tokens [T] int32, loss_mask [T] bool). Nothing was sampled, so `mask` is all False and `weights` say what is
    trained. Raises ValueError for shapes that differ, or a loss on a row's first token.
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


def _batches(tasks: Sequence[Task], tokenizer: Tokenizer, size: int, seed: int, done: int) -> Iterator[list[Row]]:
    """The rows of each step, from step number `done` on."""
    position = done * size
    while True:
        chosen = [tasks[task_order(len(tasks), seed, position + i)] for i in range(size)]
        yield [_row(task, tokenizer) for task in chosen]
        position += size


def _row(task: Task, tokenizer: Tokenizer) -> Row:
    """A task's row: prompt, answer and end token, with the loss on the last two; or prompt and demonstration."""
    if "demonstration" in task.data:
        return _demonstrated(task, tokenizer)
    answer = task.data.get("answer")
    if not isinstance(answer, str):
        raise ConfigError(
            f"warm-up needs a text `answer` in each task; {named(task.id)} has {answer!r}: set warmup.accuracy = 0"
        )
    return conversation(tokenizer, [(as_messages(task.prompt), answer)])


def _demonstrated(task: Task, tokenizer: Tokenizer) -> Row:
    """A row of several turns, with the loss on every reply. The demonstration is the messages after the prompt."""
    messages: Any = task.data["demonstration"]
    readable = isinstance(messages, list) and messages and all(map(is_message, messages))
    if not readable or messages[-1]["role"] != "assistant":
        expected = "a list of messages that ends with the assistant's"
        raise ConfigError(f"{named(task.id)}: expected as its demonstration {expected}")
    turns, heard = list[Turn](), as_messages(task.prompt)
    for message in messages:
        if message["role"] == "assistant":
            turns.append((heard, message))
            heard = Messages()
        else:
            heard.append(message)
    return conversation(tokenizer, turns)


def check_answers(tasks: Sequence[Task], tokenizer: Tokenizer, vocab: int) -> None:
    """Raise ConfigError, which names the task, for a missing answer or one with ids >= `vocab`."""
    for task in tasks:
        tokens, _ = _row(task, tokenizer)
        if unknown := unknown_token(tokens, tokenizer, vocab):
            raise ConfigError(f"the answer of {named(task.id)} {unknown}")
