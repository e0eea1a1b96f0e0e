"""RewardJudge: judges a group's attempts with a reward function, in workers or in this process.

blocking function   -> the reward workers, by its name, under their limit
async def           -> this process's event loop, under the same limit
a function that only this process has (it closes over a client, say)  -> a thread of it, one call after the other
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.core.bounded_await import bounded, bounded_call
from tidemill.core.errors import ConfigError, NotImportable, Overdue
from tidemill.core.import_object import load_object
from tidemill.core.interfaces import Gold
from tidemill.core.notebook_source.module_writer import reference_for
from tidemill.core.outcomes import outcome_of, outcomes_of
from tidemill.core.types import InfraError, Outcome, Task, Trajectory
from tidemill.core.user_code import raised
from tidemill.envs.code_checks.code_settings import prepared
from tidemill.envs.rewards.gold import Teller, gold_reply, teller_beside
from tidemill.envs.rewards.named import NAMED, named_reward
from tidemill.envs.rewards.signature import Signature, group_values, name_of, signature_of, single_values

if TYPE_CHECKING:
    from tidemill.envs.reward_workers.reward_pool import RewardPool


Judge = Callable[[Task, list[Trajectory]], Awaitable[list[Outcome]]]
"""Gives the outcomes of a group's attempts, in their order."""


class RewardJudge:
    """Judge that calls one reward function of either form (see `rewards.signature`)."""

    def __init__(
        self,
        reward: str | Callable[..., Any],
        pool: RewardPool,
        options: Mapping[str, Any] | None = None,
        source: Path | None = None,
    ) -> None:
        """reward: a named one, FILE.py:FUNCTION, MODULE:FUNCTION, or a function.

        options: further arguments. source: a folder for the source of a function without a file, from which workers import
        it. Raises ConfigError when the reward cannot be found, or its form or an option does not fit.
        """
        self._pool, self._options, self._source = pool, dict(options or {}), source
        self._function: Callable[..., Any] | None = None  # set when it runs in this process
        self._turn = asyncio.Lock()  # bounded: a call in this process ends at its limit
        self.notes = list[str]()  # sentences that the user should read before a run begins
        self.teller: Teller | None = None  # the function `gold` beside a user's reward
        self.sandbox = ""  # the level of the sandbox in which it runs replies; "" if it runs none
        self._columns = frozenset[str]()
        self._form = NAMED[reward].gold if isinstance(reward, str) and reward in NAMED else None
        self._reference, self.signature = self._resolve(reward)
        unknown = [key for key in self._options if key not in self.signature.names and not self.signature.rest]
        if unknown:
            raise ConfigError(
                f"reward {self.signature.name!r} has no option {unknown[0]!r}: it takes {', '.join(self.signature.names)}"
            )

        if reward == "code":
            self._options = prepared(self._options, pool.limit_s)
            self.sandbox = self._options["sandbox"]["level"]

    def check(self, columns: set[str]) -> None:
        """Raise ConfigError when the reward needs a column that is not in `columns`, those that any task has."""
        self.signature.check({*columns, *self._options})
        self._columns = frozenset(columns)

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def grouped(self) -> bool:
        return self.signature.group

    def gold(self, task: Task) -> Gold:
        return gold_reply(self._filled(task), self.signature, self.teller, self._form)

    async def __call__(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        task = self._filled(task)
        texts = [attempt.text for attempt in attempts]
        pick = self.signature.pick
        if self.signature.group:
            ids = [attempt.tokens[attempt.mask].tolist() for attempt in attempts]
            return await self._group(pick(group_values(task, texts, ids)) | self._options, len(texts))
        return await asyncio.gather(*(self._single(pick(single_values(task, text)) | self._options) for text in texts))

    def _filled(self, task: Task) -> Task:
        """The task with None for columns that only other tasks have, unless the parameter has a default."""
        lacking = {name: None for name in self._columns if name not in task.data and name not in self.signature.optional}
        return replace(task, data={**task.data, **lacking}) if lacking else task

    async def _single(self, kwargs: dict[str, Any]) -> Outcome:
        if self._function is None:
            return await self._pool.call(self._reference, kwargs=kwargs, name=self.name)
        value = await self._awaited(kwargs)
        return value if isinstance(value, InfraError) else outcome_of(value, self.name)

    async def _group(self, kwargs: dict[str, Any], count: int) -> list[Outcome]:
        if self._function is None:
            return await self._pool.call_group(self._reference, count, kwargs=kwargs, name=self.name)
        values = await self._awaited(kwargs)
        return [values] * count if isinstance(values, InfraError) else outcomes_of(values, self.name, count)

    async def _awaited(self, kwargs: dict[str, Any]) -> Any:
        assert self._function is not None
        name, limit_s = self.name, self._pool.limit_s
        try:
            if self.signature.awaits:
                return await bounded(self._function(**kwargs), limit_s)
            async with self._turn:
                return await bounded_call(partial(self._function, **kwargs), limit_s)
        except Overdue:
            then = "was cancelled" if self.signature.awaits else "goes on in this process, where nothing kills it"
            return InfraError(f"{name} did not return within {limit_s:g} s and {then}")
        except Exception as error:  # the user's code may raise anything, and an exception is no score
            return InfraError(f"{name} raised {raised(error)}")

    def _resolve(self, reward: str | Callable[..., Any]) -> tuple[str, Signature]:
        if isinstance(reward, str) and ":" not in reward:
            return named_reward(reward)
        function = load_object(reward) if isinstance(reward, str) else reward
        self.teller = teller_beside(function)
        signature = signature_of(function, reward if isinstance(reward, str) else name_of(function))
        if signature.awaits:
            self._function = function
            return "", signature
        if isinstance(reward, str):
            return reward, signature
        try:
            return reference_for(function, self._source, "reward"), signature
        except NotImportable as why:
            self._function = function
            self.notes.append(
                f"reward {signature.name} runs in this process, as with scoring.workers = 0: {why}. Nothing kills it at "
                "scoring.limit_s, and what it crashes is the run"
            )
            return "", signature
