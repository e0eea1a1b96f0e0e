"""Two ways to write an environment: an async function with `@environment`, or SingleTurn.

    @environment(tasks=[{"prompt": "2 + 2 =", "answer": "4"}, ...])
    async def sums(task, chat):
        return Score(float(await chat.reply(task.prompt) == task.data["answer"]))

The function talks to the policy through a `Chat` and returns the outcome. `SingleTurn` asks once and leaves the verdict to
a judge, which sees the group's attempts together. Neither keeps state between episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, overload

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ConfigError, ContextFull
from tidemill.core.interfaces import Checkable, Gold
from tidemill.core.outcomes import outcome_of
from tidemill.core.types import InfraError, Outcome, Task, Trajectory, Unscorable
from tidemill.envs.judge import Judge
from tidemill.envs.python_tasks import TaskSource, splits_of
from tidemill.envs.rewards.gold import Teller, told_by
from tidemill.envs.tasks import Splits, check_splits

Episode = Callable[[Task, Chat], Awaitable[Any]]


class SingleTurn:
    """Environment with one question and one answer per episode, and a judge of the group."""

    def __init__(self, name: str, splits: Splits, judge: Judge) -> None:
        check_splits(name, splits, prompts_apart=True)
        self.name = name
        self._splits, self._judge = splits, judge

    @property
    def notes(self) -> list[str]:
        """Sentences about its judge that the user should read before a run begins."""
        return list(getattr(self._judge, "notes", ()))

    @property
    def sandbox(self) -> str:
        """The level of the sandbox in which its judge runs replies; "" if it runs none."""
        return getattr(self._judge, "sandbox", "")

    def tasks(self, split: str) -> Sequence[Task]:
        return self._splits[split]

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        await chat.reply(task.prompt, last=True)
        return None

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return await self._judge(task, attempts)

    @property
    def grouped(self) -> bool:
        return is_grouped(self._judge)

    def gold(self, task: Task) -> Gold:
        return gold_of(self._judge, task, "its judge")

    async def close(self) -> None:
        return None


def is_grouped(judge: object) -> bool:
    """True unless an environment or judge says that it judges each attempt by itself (`Checkable.grouped`)."""
    return not isinstance(judge, Checkable) or judge.grouped


def gold_of(judge: object, task: Task, name: str) -> Gold:
    """The gold reply that an environment or judge knows; Unscorable, with its `name`, if it knows none."""
    return judge.gold(task) if isinstance(judge, Checkable) else Unscorable(f"{name} does not say what would be right")


class FunctionEnvironment:
    """Environment whose episode is a user's async function; made by `environment`."""

    grouped = False

    def __init__(self, function: Episode, tasks: TaskSource | None = None, gold: Teller | None = None) -> None:
        if not inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != 2:
            raise ConfigError(f"environment {function!r}: expected `async def NAME(task, chat)`")
        self.name = function.__name__
        self.function, self._source, self._teller = function, tasks, gold
        self._splits: Splits | None = None

    def with_tasks(self, tasks: TaskSource) -> FunctionEnvironment:
        """A copy of this environment with other tasks."""
        return FunctionEnvironment(self.function, tasks, self._teller)

    def tasks(self, split: str) -> Sequence[Task]:
        if self._splits is None:
            if self._source is None:
                raise ConfigError(f"environment {self.name!r} has no tasks: use @environment(tasks=...) or give it data")
            self._splits = splits_of(self._source, self.name)
            check_splits(self.name, self._splits)
        return self._splits[split]

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        try:
            value = await self.function(task, chat)
        except ContextFull as full:  # unless the function catches it and decides
            return Unscorable(str(full))
        return outcome_of(value, f"environment {self.name}")

    def gold(self, task: Task) -> Gold:
        if self._teller is None:
            return Unscorable("the environment does not say what would be right: give it @environment(gold=...)")
        return told_by(self._teller, task)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return [InfraError(f"environment {self.name} left the attempt undecided")] * len(attempts)

    async def close(self) -> None:
        return None


@overload
def environment(function: Episode) -> FunctionEnvironment: ...
@overload
def environment(
    *, tasks: TaskSource | None = None, gold: Teller | None = None
) -> Callable[[Episode], FunctionEnvironment]: ...
def environment(
    function: Episode | None = None, *, tasks: TaskSource | None = None, gold: Teller | None = None
) -> FunctionEnvironment | Callable[[Episode], FunctionEnvironment]:
    """Decorator that turns `async def NAME(task, chat)` into an environment.

    The function returns a Score, Unscorable, InfraError or a number.
    tasks: a list of tasks or of rows with a "prompt", or a `datasets.Dataset`; a tenth of it is held out by hash. Or a dict
    of such splits (train; and eval, test or validation), or a function that is called with "train" and "eval". Without
    tasks the recipe has to name data.
    gold: a function that returns the reply that must earn the full score, or a list with one reply per turn. Its parameters
    are filled by name, from `task`, `prompt` and the data's columns. `tidemill reward test` and the start of a run check
    the environment with it.
    """
    if function is not None:
        return FunctionEnvironment(function, tasks, gold)
    return lambda decorated: FunctionEnvironment(decorated, tasks, gold)
