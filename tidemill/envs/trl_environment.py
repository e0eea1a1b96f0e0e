"""Environments from what TRL's trainers take: `tools`, `environment_factory` and `reward_funcs`, unchanged.

    class Game:
        def reset(self, **row) -> str | None: ...     its text is added to the prompt's last message
        def guess(self, word: str) -> str: ...        every public method is a tool
        def get_reward(self) -> float: ...            optional

    env = trl_environment(Game, tasks=rows, reward_funcs=[reward])

An instance plays one episode at a time, in a thread of its own, and is reset for the next one, as in TRL.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidemill.core.chat_interface import Chat
from tidemill.core.errors import ConfigError, EpisodeFailed, Overdue
from tidemill.core.outcomes import outcome_of, outcomes_of
from tidemill.core.reply import Worked
from tidemill.core.types import InfraError, Outcome, Task
from tidemill.core.user_code import raised
from tidemill.envs.environment import FunctionEnvironment
from tidemill.envs.python_tasks import TaskSource
from tidemill.envs.reward_list import told_apart, weighted
from tidemill.envs.rewards.signature import Signature, name_of, signature_of
from tidemill.envs.tasks import columns_of
from tidemill.models.chat_template import as_messages, text_of
from tidemill.tools.function_schema import function_schema
from tidemill.tools.function_tool import as_tool, tools_of
from tidemill.tools.limited_call import OwnThread, limited_call
from tidemill.tools.tool_set import ToolSet
from tidemill.tools.work_loop import work

Factory = Callable[[], Any]
_NO_TOOLS = ("reset", "get_reward")  # public methods of TRL's environments that are no tools


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of an episode with tools."""

    limit_s: float
    max_turns: int
    max_calls: int
    max_tokens: int | None


@dataclass(slots=True)
class _Instance:
    """An environment's instance, or None where there are only tools, and the thread that all its calls run in."""

    limit_s: float
    thread: OwnThread = field(default_factory=OwnThread)
    made: Any = None

    async def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call the user's code. Raises EpisodeFailed at the limit, and what the code raises."""
        awaits = inspect.iscoroutinefunction(function)
        try:
            return await limited_call(partial(function, **arguments), self.limit_s, awaits=awaits, thread=self.thread)
        except Overdue:
            raise EpisodeFailed(f"{name_of(function)} did not return within {self.limit_s:g} s") from None


class TrlEnvironment(FunctionEnvironment):
    """Environment that plays TRL's environments and tools; made by `trl_environment`."""

    def __init__(self, parts: TrlParts, tasks: TaskSource | None = None) -> None:
        super().__init__(parts.play, tasks)
        self.name, self._parts, self._checked = parts.name, parts, False

    def with_tasks(self, tasks: TaskSource) -> TrlEnvironment:
        return TrlEnvironment(self._parts, tasks)

    def tasks(self, split: str) -> Sequence[Task]:
        found = super().tasks(split)
        if not self._checked:
            self._parts.check(columns_of([*super().tasks("train"), *super().tasks("eval")]))
            self._checked = True
        return found


class TrlParts:
    """Parts of one environment from TRL, which play its episodes."""

    def __init__(
        self,
        name: str,
        factories: Mapping[str, Factory],
        several: bool,
        tools: Sequence[Any],
        rewards: Sequence[Callable[..., Any]],
        weights: Sequence[float],
        limits: _Limits,
    ) -> None:
        """several: the column `environment` of a task names its factory."""
        self.name, self._factories, self._several, self._tools = name, factories, several, list(tools)
        self._rewards = [(function, signature_of(function, name_of(function))) for function in rewards]
        self._weights, self._limits = list(weights) or [1.0] * len(rewards), limits
        self._free: dict[str, list[_Instance]] = {}

    def check(self, columns: set[str]) -> None:
        """Raise ConfigError when a reward needs what neither an episode nor a task's column gives."""
        for _, signature in self._rewards:
            given = {*columns, "environments", "completions", "prompts", "completion", "prompt", "task"}
            if missing := [name for name in signature.required if name not in given]:
                raise ConfigError(
                    f"reward {signature.name!r} needs {missing[0]!r}, which neither tasks nor episodes have: give the "
                    "parameter a default, such as None"
                )

    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Play one episode: reset, work with tools, rewards."""
        name, row = self._row_of(task)
        instance = await self._taken(name)
        try:
            outcome = await self._played(instance, row, task, chat)
        except BaseException:  # a call may be under way in it
            instance.thread.close()
            raise
        self._free.setdefault(name, []).append(instance)
        return outcome

    def _row_of(self, task: Task) -> tuple[str, dict[str, Any]]:
        """The name of the task's factory, and the row as `reset` gets it."""
        row = {"prompt": as_messages(task.prompt), **task.data}
        name = str(row.pop("environment", "")) if self._several else ""
        if self._factories and name not in self._factories:
            known = ", ".join(self._factories)
            raise EpisodeFailed(f"task {task.id}: the column environment is {name!r}: expected one of {known}")
        return name, row

    async def _taken(self, name: str) -> _Instance:
        """An instance that no episode uses; a new one if there is none."""
        if free := self._free.get(name):
            return free.pop()
        instance = _Instance(self._limits.limit_s)
        try:
            if self._factories:
                instance.made = await instance.call(self._factories[name])
        except BaseException:
            instance.thread.close()
            raise
        return instance

    async def _played(self, instance: _Instance, row: dict[str, Any], task: Task, chat: Chat) -> Outcome:
        limits, tools, prompt = self._limits, list(self._tools), row["prompt"]
        if instance.made is not None:
            prompt = _with_observation(prompt, await instance.call(instance.made.reset, **row))
            tools += tools_of(instance.made, leave_out=_NO_TOOLS)
        own = ToolSet(tools, limit_s=limits.limit_s, as_text=trl_text, thread=instance.thread)
        options = {"max_turns": limits.max_turns, "max_calls": limits.max_calls, "max_tokens": limits.max_tokens}
        return await self._scored(instance, task, prompt, await work(chat, prompt, own, **options))

    async def _scored(self, instance: _Instance, task: Task, prompt: list[dict[str, Any]], done: Worked) -> Outcome:
        """The weighted sum of what the rewards give, and of the environment's own."""
        completion = [trl_message(each) for each in done.messages[len(prompt) :]]
        group = {key: [value] for key, value in task.data.items()}
        group |= {"completions": [completion], "prompts": [prompt]}
        single = {**task.data, "completion": done.text, "prompt": prompt, "task": {"id": task.id, "data": task.data}}
        for values in (group, single):
            values |= {"environments": [instance.made]} if instance.made is not None else {}
        names, outcomes = list[str](), list[Outcome]()
        for function, signature in self._rewards:
            outcomes.append(await _rewarded(instance, function, signature, group if signature.group else single))
            names.append(signature.name)
        weights = list(self._weights)
        if callable(own := getattr(instance.made, "get_reward", None)):
            names.append(type(instance.made).__name__)
            weights.append(1.0)
            outcomes.append(outcome_of(await instance.call(own), names[-1]))
        if not outcomes:
            return InfraError(f"environment {self.name} has neither reward_funcs nor a method get_reward")
        return weighted(told_apart([(name, "") for name in names]), weights, outcomes)


async def _rewarded(
    instance: _Instance, function: Callable[..., Any], signature: Signature, values: Mapping[str, Any]
) -> Outcome:
    try:
        value = await instance.call(function, **signature.pick(values))
    except EpisodeFailed:
        raise
    except Exception as error:  # the user's code may raise anything, and an exception is no score
        return InfraError(f"{signature.name} raised {raised(error)}")
    return outcomes_of(value, signature.name, 1)[0] if signature.group else outcome_of(value, signature.name)


def trl_environment(
    environment_factory: Factory | Mapping[str, Factory] | None = None,
    *,
    tasks: TaskSource | None = None,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    reward_weights: Sequence[float] = (),
    tools: Sequence[Callable[..., Any]] = (),
    name: str = "",
    limit_s: float = 60.0,
    max_turns: int = 64,
    max_calls: int = 256,
    max_tokens: int | None = None,
) -> TrlEnvironment:
    """An environment from the arguments that TRL's trainers take by these names.

    A reward function is called for each attempt with lists of one: `completions` (messages), `prompts`, `environments`, and
    the columns. tasks: as in `environment`. limit_s: seconds that each call of the user's code may take. Those that begin
    with max: as in `work`. Raises ConfigError for what TRL would not take, or what has no reward.
    """
    several = isinstance(environment_factory, Mapping)
    factories = dict(environment_factory) if isinstance(environment_factory, Mapping) else {}
    if environment_factory is not None and not isinstance(environment_factory, Mapping):
        factories = {"": environment_factory}
    rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    first = next(iter(factories.values()), None) or next(iter(rewards), None)
    name = name or (name_of(first) if first else "tools")
    owned = [_checked(factory) for factory in factories.values()]
    if not rewards and not (owned and all(owned)):
        raise ConfigError(f"environment {name!r} has no reward: give reward_funcs, or a method get_reward")
    if reward_weights and len(reward_weights) != len(rewards):
        raise ConfigError(f"{len(reward_weights)} reward_weights for {len(rewards)} reward_funcs: expected one for each")
    for each in tools:
        as_tool(each)
    limits = _Limits(limit_s, max_turns, max_calls, max_tokens)
    return TrlEnvironment(TrlParts(name, factories, several, tools, rewards, reward_weights, limits), tasks)


def _checked(factory: Factory) -> bool:
    """True if the factory's environments reward themselves. Raises ConfigError for a class that is no environment."""
    if not isinstance(factory, type):
        return True  # known when it has made one
    methods = dict(inspect.getmembers(factory, inspect.isfunction))
    if "reset" not in methods:
        raise ConfigError(f"environment {factory.__name__!r} has no method reset: expected reset(self, **row)")
    for name, method in methods.items():
        if not name.startswith("_") and name not in _NO_TOOLS:
            function_schema(method, name)
    return "get_reward" in methods


def _with_observation(prompt: list[dict[str, Any]], seen: Any) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned at the end of its last message."""
    if seen is None:
        return prompt
    content = prompt[-1].get("content")
    if isinstance(content, str) and isinstance(seen, str):
        return [*prompt[:-1], {**prompt[-1], "content": content + seen}]
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else list(each or []) for each in (content, seen)]
    return [*prompt[:-1], {**prompt[-1], "content": parts[0] + parts[1]}]


def trl_text(value: Any) -> str:
    """A tool's result as TRL writes it: a list of content blocks as their text, anything else as `str` has it."""
    return text_of({"content": value}) if isinstance(value, list) and all(map(_is_text, value)) else str(value)


def _is_text(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text"


def trl_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as TRL's rewards see it: a text as content, no ids, arguments of calls as mappings where they are some."""
    made = {key: value for key, value in message.items() if key != "tool_call_id"} | {
        "content": message.get("content") or ""
    }
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {"type": "function", "function": {**each["function"], "arguments": _mapping(each["function"]["arguments"])}}
            for each in calls
        ]
    return made


def _mapping(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, Mapping) else arguments
