"""Several environments as one: each task names its environment, which plays and judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from tidemill.core.chat_interface import Chat
from tidemill.core.interfaces import Environment, Gold
from tidemill.core.types import Outcome, Task, Trajectory
from tidemill.envs.curriculum import turns
from tidemill.envs.environment import SingleTurn, gold_of, is_grouped


class Several:
    """An environment made of others, by name (implements `interfaces.Environment`)."""

    def __init__(self, parts: Mapping[str, Environment], weights: Mapping[str, int]) -> None:
        """weights: by name; groups and held-out tasks come in proportion to them."""
        self.parts, self.weights = dict(parts), dict(weights)
        self.name = " + ".join(parts)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._train if split == "train" else self._eval

    @cached_property
    def _train(self) -> list[Task]:
        return [task for name in self.parts for task in self._named(name, "train")]

    @cached_property
    def _eval(self) -> list[Task]:
        """Held-out tasks in turns: the first n are in proportion until an environment runs out."""
        left = {k: iter(self._named(name, "eval")) for k, name in enumerate(self.parts)}
        cycle, found = turns(list(self.weights.values())), list[Task]()
        while left:
            for k in cycle:
                if (task := next(left.get(k, iter(())), None)) is not None:
                    found.append(task)
                else:
                    left.pop(k, None)
        return found

    def _named(self, name: str, split: str) -> list[Task]:
        return [replace(task, env=name) for task in self.parts[name].tasks(split)]

    async def run(self, task: Task, chat: Chat) -> Outcome | None:
        return await self.parts[task.env].run(task, chat)

    async def judge(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        return await self.parts[task.env].judge(task, attempts)

    @property
    def grouped(self) -> bool:
        return any(map(is_grouped, self.parts.values()))

    def gold(self, task: Task) -> Gold:
        return gold_of(self.parts[task.env], task, f"environment {task.env}")

    async def close(self) -> None:
        """Close all environments, even if one raises; the first error is raised at the end."""
        failures = []
        for part in self.parts.values():
            try:
                await part.close()
            except Exception as error:  # user code may raise anything, and the other environments hold processes
                failures.append(error)
        if failures:
            raise failures[0]


def parts_of(environment: Environment) -> list[Environment]:
    """The environments that an environment is made of: its parts, or itself."""
    return list(environment.parts.values()) if isinstance(environment, Several) else [environment]


def notes_of(environment: Environment) -> list[str]:
    """Sentences about an environment's rewards that the user should read before a run begins."""
    return [note for part in parts_of(environment) if isinstance(part, SingleTurn) for note in part.notes]


def sandboxes_of(environment: Environment) -> dict[str, str]:
    """The level of isolation of each environment whose reward runs replies as programs, by its name."""
    return {part.name: part.sandbox for part in parts_of(environment) if isinstance(part, SingleTurn) and part.sandbox}
