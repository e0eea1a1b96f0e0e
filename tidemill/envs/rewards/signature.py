"""Signature of a reward function, whose parameters are filled by name.

    (completion, ...)    once per attempt. Names: completion, prompt, task, and every column of the task's data.
    (completions, ...)   once per group, as in TRL. Names: completions, prompts, completion_ids, and every column as a
                         list; `environments` in `trl_environment`. Conversational prompts give conversational completions.

`**kwargs` receives every column and name not listed. A parameter with a default keeps it when nothing has its name. A
parameter that nothing can fill is an error before anything runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.types import Task

_SINGLE = ("completion", "prompt", "task")
_GROUP = ("completions", "prompts", "completion_ids")
_ASKED_FOR = ("task", "completion")  # not passed to `**kwargs`; TRL leaves out a column `completion` as well
_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")  # further names that TRL passes


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a reward function, and the form in which it is called."""

    name: str  # the reward as the user named it
    group: bool  # called once for the whole group
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    rest: bool = False  # has **kwargs
    awaits: bool = False  # async def

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional

    def check(self, columns: Collection[str]) -> None:
        """Raise ConfigError when neither the call nor the task's columns can fill a parameter."""
        given = (*(_GROUP if self.group else _SINGLE), *columns)
        missing = [name for name in self.required if name not in given]
        if beyond := [name for name in missing if name in _TRAINERS]:
            raise ConfigError(
                f"reward {self.name!r} needs {beyond[0]!r}, which TRL's trainer gives and a reward beside the trainer "
                "cannot have: give the parameter a default, such as None, or environments to `trl_environment`"
            )
        if missing:
            have = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"reward {self.name!r} needs {', '.join(map(repr, missing))}, which no task has (columns: {have}); "
                "rename the parameter or the column, or give it a default"
            )

    def pick(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the call, selected from all available values."""
        return {k: v for k, v in values.items() if k in self.names or (self.rest and k not in _ASKED_FOR)}


def signature_of(function: Callable[..., Any], name: str) -> Signature:
    """The signature of a function. Raises ConfigError when it has neither form."""
    if not callable(function):
        raise ConfigError(f"reward {name!r} is a {type(function).__name__}: expected a function")
    required, optional, rest = [], [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"reward {name!r}: parameter {parameter.name!r} is positional-only, but they are filled by name"
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(parameter.name)
    group = bool({"completions", "environments"} & {*required, *optional})
    if not group and "completion" not in required + optional:
        raise ConfigError(
            f"reward {name!r} takes ({', '.join(required + optional)}): expected a parameter `completion` (called once an "
            "attempt) or `completions` (called once a group, TRL's form)"
        )
    awaits = inspect.iscoroutinefunction(function) or (
        not inspect.isfunction(function) and inspect.iscoroutinefunction(type(function).__call__)
    )
    return Signature(name, group, tuple(required), tuple(optional), rest, awaits)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, of the function behind a partial, or of a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def single_values(task: Task, completion: str) -> dict[str, Any]:
    """All values that a reward for one attempt may ask for, by name."""
    row = {"id": task.id, "prompt": task.prompt, "data": task.data}
    return {**task.data, "completion": completion, "prompt": task.prompt, "task": row}


def group_values(task: Task, completions: Sequence[str], ids: Sequence[list[int]]) -> dict[str, Any]:
    """All values that a reward for a group may ask for, by name and in TRL's shapes."""
    count = len(completions)
    chat = not isinstance(task.prompt, str)
    texts = [[{"role": "assistant", "content": text}] for text in completions] if chat else list(completions)
    columns = {key: [value] * count for key, value in task.data.items()}
    return {**columns, "completions": texts, "prompts": [task.prompt] * count, "completion_ids": list(ids)}
