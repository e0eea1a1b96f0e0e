"""Several environments as one: every task names its own, and whatever is asked about a task is asked of that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from tidemill.core.interfaces import Chat, Checkable, Environment, Gold
from tidemill.core.types import Outcome, Task, Trajectory, Unscorable
from tidemill.envs.environment import SingleTurn
from tidemill.envs.task_order import turns


class Several:
    """`protocols.Environment` of others, by name."""

    def __init__(self, parts: Mapping[str, Environment], weights: Mapping[str, int]) -> None:
        """weights: groups come, and held-out tasks are taken, in proportion to them."""
        self.parts, self.weights = dict(parts), dict(weights)
        self.name = " + ".join(parts)

    def each(self, change: Callable[[str, Environment], Environment]) -> Several:
        """The same with every environment as `change` makes it."""
        return Several({name: change(name, part) for name, part in self.parts.items()}, self.weights)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._train if split == "train" else self._eval

    @cached_property
    def _train(self) -> list[Task]:
        return [task for name in self.parts for task in self._named(name, "train")]

    @cached_property
    def _eval(self) -> list[Task]:
        """In turns: the first n are in proportion, as long as none has run out of tasks."""
        left = {k: iter(self._named(name, "eval")) for k, name in enumerate(self.parts)}
        cycle, found = turns(list(self.weights.values())), list[Task]()
        while left:
            for k in cycle:
                task = next(left[k], None) if k in left else None
                if task is not None:
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
        return any(not isinstance(part, Checkable) or part.grouped for part in self.parts.values())

    def gold(self, task: Task) -> Gold:
        part = self.parts[task.env]
        if isinstance(part, Checkable):
            return part.gold(task)
        return Unscorable(f"environment {task.env} does not say what would be right")

    async def close(self) -> None:
        """All of them, also when one raises."""
        failures = []
        for part in self.parts.values():
            try:
                await part.close()
            except Exception as error:  # the user's code: the others hold processes
                failures.append(error)
        if failures:
            raise failures[0]


def parts_of(environment: Environment) -> list[Environment]:
    """The environments that stand behind it."""
    return list(environment.parts.values()) if isinstance(environment, Several) else [environment]


def notes_of(environment: Environment) -> list[str]:
    """What the user should hear of its rewards before a run begins."""
    return [note for part in parts_of(environment) if isinstance(part, SingleTurn) for note in part.notes]
