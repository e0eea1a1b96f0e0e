"""Turns tasks into groups: sibling episodes run side by side, then the group is judged.

    task -> group_size episodes (environment x engine, side by side) -> judge -> Group

An exception in an environment makes that attempt an `InfraError`, never a score (I5). An attempt without a sampled token
cannot be trained on, has no version and cannot earn a score; it stays in the group as evidence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tidemill.controller.policy_pools import AnyRoute, Pool
from tidemill.core.bounded_await import bounded
from tidemill.core.episode_counts import counted, counting
from tidemill.core.errors import EnvironmentLost, EpisodeFailed, EpisodeOver, Overdue, WorkerLost
from tidemill.core.interfaces import Environment, Sampler
from tidemill.core.outcomes import clip, fitting, outcome_of, outcomes_of
from tidemill.core.token_extras import TokenExtra
from tidemill.core.types import (
    GREEDY,
    Finish,
    Group,
    InfraError,
    Outcome,
    SamplingParams,
    Score,
    Task,
    Trajectory,
    Unscorable,
    Version,
)
from tidemill.core.user_code import TOLD, raised
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.models.tokenizer import Tokenizer
from tidemill.observability.episode_times import EpisodeTimes
from tidemill.observability.time_breakdown import EPISODE, REWARD
from tidemill.observability.timeline import Beside

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Settings shared by all episodes: environment, tokenizer, sampling parameters and limits."""

    environment: Environment
    tokenizer: Tokenizer
    params: SamplingParams
    context: int  # tokens
    limit_s: float  # an episode that takes longer ends as an InfraError
    vocab: int | None = None  # tokens that the model knows
    extras: tuple[TokenExtra, ...] = ()  # recorded for each token, because training reads them
    paused_s: Callable[[], float] = lambda: 0.0  # seconds so far in which engines slept; episodes are not charged for them
    policies: Mapping[str, str] = field(default_factory=dict[str, str])  # by environment; "": of every other one
    frozen: Mapping[str, Version] = field(default_factory=dict[str, Version])  # that environments may ask, by policy
    refused: Callable[[str], None] | None = None  # told why a call of an agent was refused
    times: EpisodeTimes | None = None  # where episodes and their turns are noted

    def within(self, context: int) -> EpisodeSetup:
        """The setup with at most this context, that of the engines which serve now."""
        return replace(self, context=min(self.context, context))

    async def play(
        self, task: Task, engine: Sampler, key: str, seeds: Callable[[int], int], sample: int = 0
    ) -> list[Trajectory]:
        """The rows of one attempt. Its outcome, on the last one, is None when the environment leaves it to `judge`.

        An attempt that is lost with its worker, perhaps by a sibling's fault, is begun anew with the same seeds, once.
        What its parts counted, see `core.episode_counts`, stands in the last row's `info`.
        """
        counts, times = Counter[str](), self.times or EpisodeTimes()
        with counting(counts.update, self.refused), times.episode(engine) as timed:
            rows = await self._played(task, timed, key, seeds, sample)
        rows[-1].info |= {name: float(count) for name, count in counts.items()}
        return rows

    async def _played(
        self, task: Task, engine: Sampler, key: str, seeds: Callable[[int], int], sample: int, again: bool = False
    ) -> list[Trajectory]:
        how: dict[str, Any] = {"context": self.context, "vocab": self.vocab, "extras": self.extras, "frozen": self.frozen}
        how["policy"] = self.policies.get(task.env, self.policies.get("", "policy"))
        chat = EpisodeChat(engine, self.tokenizer, self.params, **how, key=key, seeds=seeds, sample=sample)
        finish: Finish | None = None
        outcome: Outcome | None
        try:
            outcome = await bounded(self.environment.run(task, chat), self.limit_s, self.paused_s)
            if outcome is not None:  # the user's code may return anything
                outcome = outcome_of(outcome, f"environment {self.environment.name}")
        except EpisodeOver as over:
            outcome, finish = Unscorable(str(over)), over.finish
        except EnvironmentLost:
            raise
        except Exception as error:  # the environment is the user's code: an exception fails that attempt alone
            if chat.failure is not None:  # the engine's failure, passing through the user's code
                raise chat.failure from None
            await engine.abort(key)
            if isinstance(error, WorkerLost):
                counted("workers/lost")
            if isinstance(error, WorkerLost) and not again:
                return await self._played(task, engine, key, seeds, sample, again=True)
            logger.warning("environment %s raised on task %s", self.environment.name, task.id, exc_info=error)
            reason = f"the episode took longer than {self.limit_s:g} s" if isinstance(error, Overdue) else _reason(error)
            outcome, finish = InfraError(reason), Finish.ENV_ERROR
        if chat.failure is not None:  # also when the environment swallowed it: an engine's failure is no outcome
            raise chat.failure
        if not chat.sampled and not isinstance(outcome, Unscorable | InfraError):
            outcome, finish = self._unasked(outcome), Finish.ENV_ERROR
        rows = chat.rows(outcome, finish)
        rows[-1].outcome = fitting(outcome, replies_of(rows), f"environment {self.environment.name}")
        return rows

    def _unasked(self, outcome: Score | None) -> InfraError:
        """The error of an attempt in which the policy said nothing: there is nothing to score or train."""
        returned = "nothing" if outcome is None else f"Score({outcome.value:g})"
        return InfraError(
            f"environment {self.environment.name} returned {returned} for an attempt without a reply of the policy: there "
            "is nothing to score; call chat.reply first, or return Unscorable or InfraError with a reason"
        )

    async def judge(self, task: Task, attempts: Sequence[list[Trajectory]]) -> None:
        """Judge together the attempts that `run` left undecided, and write their outcomes. attempts: the rows of each."""
        open_ones = [rows for rows in attempts if rows[-1].outcome is None]
        if not open_ones:
            return
        start = time.monotonic()
        outcomes = await self._outcomes(task, [rows[-1] for rows in open_ones])
        for rows, outcome in zip(open_ones, outcomes, strict=True):
            rows[-1].outcome = fitting(outcome, replies_of(rows), f"environment {self.environment.name}")
            rows[-1].info["reward_s"] = time.monotonic() - start

    async def _outcomes(self, task: Task, attempts: list[Trajectory], again: bool = False) -> list[Outcome]:
        """The outcomes that `judge` returns, one for each attempt.

        If it raises, hangs or returns another number of outcomes, each is an InfraError.
        """
        try:
            outcomes = await bounded(self.environment.judge(task, attempts), self.limit_s)
            return outcomes_of(outcomes, f"environment {self.environment.name}", len(attempts))
        except EnvironmentLost:
            raise
        except Exception as error:  # the user's code, as above
            if isinstance(error, WorkerLost) and not again:
                return await self._outcomes(task, attempts, again=True)
            logger.warning("environment %s could not judge task %s", self.environment.name, task.id, exc_info=error)
            reason = f"judging took longer than {self.limit_s:g} s" if isinstance(error, Overdue) else _reason(error)
            return [InfraError(reason) for _ in attempts]


def replies_of(rows: Sequence[Trajectory]) -> int:
    """The replies of an attempt: the turns that a score may reward, of one row after another."""
    return sum(row.replies for row in rows)


def _reason(error: Exception) -> str:
    return clip(str(error) if isinstance(error, EpisodeFailed) else raised(error), TOLD)


class Rollout:
    """`interfaces.Roller` over a pool of engines."""

    def __init__(
        self,
        pool: Pool,
        episodes: EpisodeSetup,
        group_size: int,
        run_seed: int,
        beside: Beside | None = None,
        baseline: bool = False,
    ) -> None:
        """Sample groups of `group_size` attempts.

        beside: where episodes and judging are noted, for the time breakdown. baseline: play one more attempt at each task,
        greedily (sample GREEDY), which is not trained on.
        """
        self._pool, self._episodes, self._size, self._seed = pool, episodes, group_size, run_seed
        self._beside, self._greedy = beside or Beside(), greedy(episodes) if baseline else None

    async def rollout(self, group_id: int, task: Task) -> Group:
        with self._beside.span(EPISODE, group=group_id):
            attempts = await self._pool.run(lambda engine: self._attempts(engine, group_id, task))
        with self._beside.span(REWARD, group=group_id):
            await self._episodes.judge(task, attempts)
        return Group(group_id, task, [row for rows in attempts for row in rows])

    async def _attempts(self, engine: AnyRoute, group_id: int, task: Task) -> list[list[Trajectory]]:
        samples = [*range(self._size), *([GREEDY] if self._greedy else [])]
        return await all_of(self._attempt(engine, group_id, task, sample) for sample in samples)

    async def _attempt(self, engine: AnyRoute, group_id: int, task: Task, sample: int) -> list[Trajectory]:
        episodes = self._greedy if self._greedy and sample == GREEDY else self._episodes
        return await episodes.within(engine.context).play(
            task,
            engine,
            key=f"g{group_id}/{sample}",
            seeds=rollout_seeds(self._seed, group_id, sample),
            sample=sample,
        )


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all works: their results, or the first error once all have ended.

    A task group will not do: a work that fails while it is cancelled would hide the cancellation, and the caller, which
    plays a lost group again, would go on for ever.
    """
    tasks, cancelled = [asyncio.ensure_future(work) for work in works], None
    left = set(tasks)
    while left:
        try:
            # bounded: an episode has its limit, and one that was cancelled ends
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.cancelled() or task.exception() for task in done)
        except asyncio.CancelledError as error:
            cancelled, failed = error, True
        if failed:
            for task in left:
                task.cancel()
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]  # all are retrieved
    if cancelled is not None:
        raise cancelled
    if errors:
        raise errors[0]
    return [task.result() for task in tasks]


def greedy(episodes: EpisodeSetup) -> EpisodeSetup:
    """Copy of the setup with greedy decoding, for attempts that are not trained on."""
    return replace(episodes, params=replace(episodes.params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), extras=())
