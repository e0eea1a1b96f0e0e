"""Greedy evaluation on held-out tasks, pinned to one version of each policy.

Every token of an evaluation comes from a version that is evaluated. Attempts without a score are told of with their reasons.
Where none has one at the beginning, the run ends, as it does where a verifier never judges a group: see `circuit_breaker`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from tidemill.controller.circuit_breaker import PATIENCE
from tidemill.controller.policy_pools import Pool
from tidemill.controller.rollout import EpisodeSetup, all_of, greedy
from tidemill.core.errors import PolicyMismatch, RunFailed
from tidemill.core.outcomes import SOLVED, parts_of
from tidemill.core.seeding import derive_seed
from tidemill.core.types import (
    TRUNCATED,
    UNANSWERED,
    Group,
    InfraError,
    Metrics,
    Score,
    Task,
    Trajectory,
    Unscorable,
    Version,
)

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
MOST_PARTS = 32  # parts of a reward that are reported, at most
CONCURRENT = 256  # episodes at a time: enough to fill the engines, without a queue of thousands
SCOUTS = 32  # attempts of a first evaluation that begin before the others, and end it where none can be judged


@dataclass(frozen=True, slots=True)
class Unscored:
    """The attempts of an evaluation that have no score, and why."""

    attempts: int  # with those that have one
    reasons: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # of these, the attempts in which the policy has no part: see `_is_no_doing_of_the_policy`

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Unscored:
        attempts = [rows for group in groups for rows in group.attempts]
        outcomes = [rows[-1].outcome for rows in attempts]
        reasons = Counter(each.reason for each in outcomes if isinstance(each, InfraError | Unscorable))
        return cls(len(attempts), reasons, sum(map(_is_no_doing_of_the_policy, attempts)))

    @property
    def commonest(self) -> str:
        return next((reason for reason, _ in self.reasons.most_common(1)), "")

    @property
    def any_scored(self) -> bool:
        return self.reasons.total() < self.attempts

    def cause(self, where: str, first: str = "") -> str | None:
        """A sentence for the end of a run if this is a mistake and no disturbance, else None.

        Only where the policy has no part in the failure of all attempts: what else cannot be scored, or was cut off, may be
        the doing of a model that has yet to learn.

        where: the attempts were made. first: "first " where others would follow.
        """
        if self.attempts < PATIENCE or self.failed < self.attempts:
            return None
        return (
            f"none of the {first}{self.attempts:,} attempts at {where} has a score; the commonest reason "
            f"({self.reasons[self.commonest]:,}): {self.commonest}. Mend the agent, the environment or the reward, and give "
            "the same command again; `tidemill reward test RECIPE` shows what the reward says, and the logs have any "
            "tracebacks"
        )


def _is_no_doing_of_the_policy(rows: Sequence[Trajectory]) -> bool:
    """True for an infrastructure error of an attempt that no limit cut off, and where the policy was not asked yet.

    So it is with a program that ends at its start. One that fails after a reply may do so because of that reply, and a
    reward may return None for the same cause. One that is late while it waits may have a policy that does not end its reply.
    """
    outcome = rows[-1].outcome
    if isinstance(outcome, Unscorable):
        return not any(row.sampled for row in rows) and not rows[-1].info.get(UNANSWERED)
    return isinstance(outcome, InfraError) and rows[-1].finish not in TRUNCATED


class Evaluator:
    """Plays held-out tasks greedily on the pool and summarises the outcomes."""

    def __init__(
        self,
        pool: Pool,
        episodes: EpisodeSetup,
        seed: int,
        tell: Callable[[Unscored], None] = lambda found: None,
        first: str = "",
    ) -> None:
        """Evaluate on `pool`.

        tell: called after each evaluation. first: the tasks' name, if nothing has been judged yet: an evaluation raises
        RunFailed then, until one has judged something.
        """
        self._pool, self._episodes, self._seed = pool, replace(greedy(episodes), times=None, refused=None), seed
        self._tell, self._first = tell, first
        self._runs = itertools.count()

    async def __call__(self, tasks: Sequence[Task], versions: Sequence[Version] | None = None) -> Metrics:
        """Metrics over `tasks`: see `summary`. Raises PolicyMismatch when a token is of none of these versions.

        Raises RunFailed when nothing could be judged, now or before.
        versions: one of each policy; None: any.
        """
        groups = await self.groups(tasks)
        for t in (t for group in groups for t in group.trajectories):
            if versions is not None and any(source not in versions for source in t.sources):
                evaluated, met = (", ".join(map(str, each)) for each in (versions, t.sources))
                raise PolicyMismatch(f"evaluation of {evaluated} met tokens of {met}")
        found = Unscored.of(groups)
        if self._first and (why := found.cause(self._first)) is not None:
            raise RunFailed(why)
        if found.any_scored:
            self._first = ""
        self._tell(found)
        return summary(groups) | by_environment(groups)

    async def groups(self, tasks: Sequence[Task]) -> list[Group]:
        """A group of one greedy attempt at each task, judged, in the order of the tasks.

        Raises RunFailed when nothing was judged before, and the first attempts say that nothing will be.
        """
        places, run = asyncio.Semaphore(CONCURRENT), next(self._runs)  # each evaluation's episodes have keys of their own
        scouts, ended = self._scouts(len(tasks)), dict[int, Group]()

        async def attempt(index: int, task: Task) -> Group:
            async with places:  # bounded: an episode has its limit
                seeds = lambda turn: derive_seed(self._seed, "eval", task.id, turn)  # noqa: E731
                key = f"eval/{run}/{index}"
                played = await self._pool.run(
                    lambda engine: self._episodes.within(engine.context).play(task, engine, key, seeds)
                )
                await self._episodes.judge(task, [played])
            ended[index] = Group(index, task, played)
            if index in scouts and ended.keys() >= scouts:
                self._expect_some(list(ended.values()))
            return ended[index]

        order = sorted(range(len(tasks)), key=lambda index: (index not in scouts, index))
        await all_of(attempt(index, tasks[index]) for index in order)
        return [ended[index] for index in range(len(tasks))]

    def _scouts(self, tasks: int) -> frozenset[int]:
        """The tasks, evenly among all, whose attempts begin first and say whether any can be judged; else none."""
        count = SCOUTS if self._first and tasks > SCOUTS else 0
        return frozenset(i * tasks // count for i in range(count))

    def _expect_some(self, ended: Sequence[Group]) -> None:
        if (why := Unscored.of(ended).cause(self._first, "first ")) is not None:
            raise RunFailed(why)


def by_environment(groups: Sequence[Group]) -> Metrics:
    """NAME/accuracy, NAME/reward and NAME/n of each environment, if the tasks come from several."""
    names = dict.fromkeys(group.task.env for group in groups)
    if len(names) < 2:
        return {}
    found = Metrics()
    for name in names:
        own = summary([group for group in groups if group.task.env == name])
        found |= {f"{name}/{figure}": own[figure] for figure in ("n", "accuracy", "reward")}
    return found


def errors_apart(before: float, n: int, after: float, m: int) -> float:
    """The drop from share `before` (of n) to share `after` (of m), in standard errors.

    The standard error is the pooled one, so it is not 0 where both are 0 or 1 of a few.
    https://www.itl.nist.gov/div898/handbook/prc/section3/prc33.htm
    """
    pooled = (before * n + after * m) / (n + m)
    error = sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return (before - after) / error if error > 0 else 0.0


def summary(groups: Sequence[Group]) -> Metrics:
    """Metrics of the attempts in these groups.

    `accuracy` is the share of all attempts that are solved, with its standard error `accuracy_se`; one without a score
    is not solved. `infra_errors` and `unscorable` count the attempts without a score. `reward` is the mean over those with a
    score, `reward.PART` that of a named part over those that have it, and `length` is over those that have a reply.
    """
    attempts = [t for group in groups for t in group.ends]
    lengths = [length for group in groups for rows in group.attempts if (length := sum(t.sampled for t in rows))]
    n = max(len(attempts), 1)
    rewards = np.array([t.outcome.value for t in attempts if isinstance(t.outcome, Score)] or [0.0])
    accuracy = float((rewards >= SOLVED).sum()) / n
    return {
        "n": float(len(attempts)),
        "accuracy": accuracy,
        "accuracy_se": float(np.sqrt(accuracy * (1 - accuracy) / n)),
        "reward": float(rewards.mean()),
        "length": float(np.mean(lengths or [0])),
        "truncated": sum(t.finish in TRUNCATED for t in attempts) / n,
        "infra_errors": float(sum(isinstance(t.outcome, InfraError) for t in attempts)),
        "unscorable": float(sum(isinstance(t.outcome, Unscorable) for t in attempts)),
        **{f"reward.{name}": float(np.nanmean(values)) for name, values in parts_of(attempts, MOST_PARTS).items()},
    }


def interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n.

    Unlike share +- 1.96 errors it stays within 0..1 and has a width at the ends.

    https://www.itl.nist.gov/div898/handbook/prc/section2/prc241.htm
    """
    if n == 0:
        return 0.0, 1.0
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
