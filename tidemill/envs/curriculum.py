"""Curriculum: chooses the task of each new group by order, weights and pass rates; retires tasks.

    recorded groups and their rewards -> a pass rate for each task -> choose(group id) -> a task

A task's pass rate is the share of the attempts in its latest KEPT groups that earned the full score. It depends only on the
tasks and rewards of groups, not on the order in which they finished. A resume computes it again from the ledger, and
nothing else is saved. The order "shuffled" without retirement needs no pass rates: the task follows from the group's id.

shuffled    every task once a round, each round in another order
frontier    tasks that are passed sometimes, nearest to one half first: LILO, 2502.12272, whose learnability p (1 - p) is the
            variance of success, to which the expected improvement is proportional
easy_first  the highest pass rate first, retired tasks left out: E2H, 2506.06632, with "easy" measured by the policy itself
mixed       half frontier, half shuffled

Untried tasks and tasks that seem too hard are still tried. A share of the turns (EXPLORE) is shuffled, and a turn that
finds no task of its kind takes one of those given least often. A preferred task rests while others are given (REST);
otherwise training would see only the few tasks nearest to one half. A task is retired for good when a whole group of it
reaches the given pass rate: ScaleRL, 2510.13786 (its "no positive resampling", at 0.9).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from tidemill.core.outcomes import SOLVED
from tidemill.core.seeding import derive_seed
from tidemill.core.types import GREEDY, Array, Group, Metrics, Task

Order = Literal["shuffled", "frontier", "easy_first", "mixed"]
EXPLORE: dict[str, int] = {"shuffled": 1, "mixed": 2, "frontier": 4, "easy_first": 4}  # one turn in N is shuffled, by chance
REST = 4  # a preferred task rests for as many groups as one fourth of the tasks with known pass rates
KEPT = 4  # latest groups of a task that count for its pass rate


class Pool:
    """The tasks of one environment, by index: statistics of each, and the choice of the next."""

    def __init__(self, count: int, seed: int, order: Order = "shuffled", retire: float = 0.0) -> None:
        self.count, self._seed, self._order, self._retire = count, seed, order, retire
        self.retired = np.zeros(count, bool)
        self.rates = np.full(count, np.nan)  # pass rates, NaN: not known
        self.given = np.zeros(count, np.int64)  # groups so far
        self._rounds = np.zeros(count, np.int64)  # groups given in shuffled turns
        self._latest = np.full(count, -1, np.int64)  # the greatest id of a group
        self._away = np.zeros(count, np.int64)  # groups that are still in flight
        self._recent = np.zeros((count, KEPT, 3), np.int64)  # latest groups: id, attempts that passed, attempts with a score
        self._recent[:, :, 0] = -1

    @property
    def by_number(self) -> bool:
        """True when the task follows from the position alone."""
        return self._order == "shuffled" and not self._retire

    def choose(self, group_id: int, position: int) -> int | None:
        """Index of the task for this group, the environment's `position`-th; None when all are retired.

        The choice is not counted: call `give` when the group is admitted.
        """
        if self.by_number:
            return task_order(self.count, self._seed, position)
        if self.retired.all():
            return None
        live = np.flatnonzero(~self.retired)
        if self._is_shuffled(group_id):
            return int(live[self._places[live].argmin()])
        worth = self._preferred(group_id)
        best = np.flatnonzero(worth == worth.max())
        if worth[best[0]] > 0:
            return int(best[self._latest[best].argmin()])
        least = live[self.given[live] == self.given[live].min()]
        return int(least[self._places[least].argmin()])

    def give(self, group_id: int, index: int) -> None:
        """Record that the group was admitted with this task."""
        self.given[index] += 1
        self._away[index] += 1
        self._latest[index] = max(self._latest[index], group_id)
        if not self.by_number and self._is_shuffled(group_id):
            self._rounds[index] += 1
            self._places[index] = self._place(index)

    def learn(self, group_id: int, index: int, rewards: Sequence[float]) -> None:
        """Record the rewards of the attempts of a group, NaN for an attempt without a score."""
        scored = [reward for reward in rewards if not np.isnan(reward)]
        passed = sum(reward >= SOLVED for reward in scored)
        known = self._recent[index]
        same = np.flatnonzero(known[:, 0] == group_id)
        place = int(same[0]) if same.size else int(known[:, 0].argmin())
        if group_id >= known[place, 0]:
            known[place] = group_id, passed, len(scored)
        total = int(known[:, 2].sum())
        self.rates[index] = int(known[:, 1].sum()) / total if total else np.nan
        self._away[index] -= 1
        whole = len(scored) == len(rewards) > 0
        self.retired[index] |= bool(self._retire) and whole and passed >= self._retire * len(scored)

    def _is_shuffled(self, group_id: int) -> bool:
        """True for a shuffled turn: by chance, without a rhythm, and the same again after a resume."""
        return derive_seed(self._seed, "turn", group_id) % EXPLORE[self._order] == 0

    def _preferred(self, group_id: int) -> Array:
        """[count] the preference for each task now; 0 for one that is unknown, unsuited, resting or in flight."""
        rest = int((~np.isnan(self.rates) & ~self.retired).sum()) // REST
        free = ~self.retired & (self._away == 0) & (self._latest < group_id - rest)
        rates = np.nan_to_num(self.rates)
        return np.where(free, rates if self._order == "easy_first" else rates * (1 - rates), 0.0)

    @cached_property
    def _places(self) -> Array:
        """[count] the next shuffled round of each task, plus its place within the round (0 to 1)."""
        return np.array([self._place(index) for index in range(self.count)])

    def _place(self, index: int) -> float:
        round_ = int(self._rounds[index])
        return round_ + derive_seed(self._seed, "place", round_, index) / 2**63


@dataclass(frozen=True, slots=True)
class _Part:
    pool: Pool
    first: int  # index of its first task among all
    weight: int


class Curriculum:
    """The training tasks of a run, from one environment or from several with weights."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        order: Order = "shuffled",
        retire: float = 0.0,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """weights: by environment, in the order of their tasks; groups come in proportion to them."""
        self._tasks = tasks
        names = [task.env if weights else "" for task in tasks]
        self._parts: list[_Part] = []
        for name, weight in (weights or {"": 1}).items():
            own = derive_seed(seed, "tasks", name) if weights else seed
            self._parts.append(_Part(Pool(names.count(name), own, order, retire), names.index(name), weight))
        self._expected: list[float] = []  # known pass rates of the tasks given since the last call of `figures`

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        return {(task.env, task.id): number for number, task in enumerate(self._tasks)}

    @property
    def by_number(self) -> bool:
        return all(part.pool.by_number for part in self._parts)

    def matters_from(self, next_id: int) -> int:
        """The first group below `next_id` whose record a resume must read.

        When tasks follow from ids alone, pass rates are only metrics. Then the latest groups of each task are enough, and
        the whole record of a long run need not be read.
        """
        if not self.by_number:
            return 0
        turns = sum(part.weight for part in self._parts)
        rounds = [-(-part.pool.count * turns // part.weight) for part in self._parts]
        return max(0, next_id - (KEPT + 1) * max(rounds))

    def task_of(self, env: str, name: str) -> Task | None:
        """The task with this environment and id; None when there is none (any more)."""
        number = self._numbers.get((env, name))
        return None if number is None else self._tasks[number]

    def choose(self, group_id: int) -> Task | None:
        """The task for a group that is about to be admitted; None when all are retired. `give` records it."""
        live = tuple(0 if part.pool.retired.all() else part.weight for part in self._parts)
        if not any(live):
            return None
        cycle = _cycle(live)
        whole, place = divmod(group_id, len(cycle))
        k = cycle[place]
        part = self._parts[k]
        index = part.pool.choose(group_id, whole * live[k] + cycle[:place].count(k))
        assert index is not None, "its pool has one that is not retired"
        return self._tasks[part.first + index]

    def give(self, group_id: int, task: Task) -> None:
        part, index = self._place(self._numbers[task.env, task.id])
        rate = part.pool.rates[index]
        if not np.isnan(rate):
            self._expected.append(float(rate))
        part.pool.give(group_id, index)

    def learn(self, group_id: int, task: Task, rewards: Sequence[float]) -> None:
        part, index = self._place(self._numbers[task.env, task.id])
        part.pool.learn(group_id, index, rewards)

    def learn_group(self, group: Group) -> None:
        if (group.task.env, group.task.id) in self._numbers:  # the task of a group in flight may be gone after a resume
            self.learn(group.id, group.task, [t.reward for t in group.ends if t.sample != GREEDY])

    def figures(self) -> Metrics:
        """Metrics: shares of seen and retired tasks; the mean known pass rate of those given since the last call."""
        pools = [part.pool for part in self._parts]
        given, retired = np.concatenate([p.given for p in pools]), np.concatenate([p.retired for p in pools])
        found = {"seen": float((given > 0).mean()), "retired": float(retired.mean())}
        if self._expected:
            found["expected"] = float(np.mean(self._expected))
            self._expected.clear()
        return {f"data/{name}": value for name, value in found.items()}

    def _place(self, number: int) -> tuple[_Part, int]:
        part = next(each for each in reversed(self._parts) if each.first <= number)
        return part, number - part.first


def task_order(count: int, seed: int, position: int) -> int:
    """Index (0 to count-1) of the task at `position` 0, 1, 2, ...; each epoch has every task once.

    An epoch is `count` positions. Raises ValueError unless count >= 1 and position >= 0.
    """
    if count < 1 or position < 0:
        raise ValueError(f"count={count}, position={position}: expected count >= 1 and position >= 0")
    epoch, within = divmod(position, count)
    return _permutation(count, seed, epoch)[within]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    # Sorted by random(), because Python keeps its sequence between versions, but not that of shuffle().
    draw = random.Random(derive_seed(seed, "order", epoch))
    keys = [draw.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def turns(weights: Sequence[int]) -> list[int]:
    """A cycle of sum(weights) places in which index k comes weights[k] times, evenly spread.

    The j-th turn of k is due at (j + 1/2) / weights[k]: Webster's method for seats in a parliament, used as an order. Every
    whole cycle is exact. Among K indices, after n turns, k is ahead or behind by at most 1/2 + K/2 * its share.
    """
    if not weights or any(weight < 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights {list(weights)}: expected numbers >= 0, one of them positive")
    due = [((2 * j + 1) / weight, k) for k, weight in enumerate(weights) for j in range(weight)]
    return [k for _, k in sorted(due)]


_cycle = lru_cache(maxsize=64)(turns)
