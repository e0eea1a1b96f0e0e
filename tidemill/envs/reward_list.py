"""Several reward functions as one judge, whose score is the weighted sum of theirs.

As with TRL's `reward_funcs`, a reward that gives an attempt no score (None) does not apply, and the others count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Gold
from tidemill.core.outcomes import SOLVED
from tidemill.core.types import InfraError, Outcome, Score, Task, Trajectory, Unscorable
from tidemill.envs.judge import RewardJudge
from tidemill.envs.rewards.named import NAMED
from tidemill.envs.rewards.signature import name_of

if TYPE_CHECKING:
    from tidemill.envs.reward_workers.reward_pool import RewardPool

Reward = str | Callable[..., Any]
DIGITS = 12  # decimals of a sum: weights such as 0.7, 0.2 and 0.1 add up to exactly 1
TAKEN = ("mean",)  # reward/mean is the metric of the sum itself


class SeveralRewards:
    """Judge that adds up the weighted outcomes of other judges."""

    def __init__(self, judges: Sequence[RewardJudge], names: Sequence[str], weights: Sequence[float]) -> None:
        self._judges, self.names, self._weights = judges, list(names), list(weights)

    def check(self, columns: set[str]) -> None:
        for judge in self._judges:
            judge.check(columns)

    @property
    def name(self) -> str:
        return "+".join(self.names)

    @property
    def notes(self) -> list[str]:
        found = [note for judge in self._judges for note in judge.notes]
        enough = [name for name, weight in zip(self.names, self._weights, strict=True) if weight >= SOLVED]
        if enough and len(self.names) > 1:
            found.append(
                f"accuracy counts a weighted sum of 1 or more, which {' or '.join(enough)} alone may reach: with "
                "reward_weights that add up to 1 it counts what every reward gives 1"
            )
        return found

    @property
    def sandbox(self) -> str:
        return next((judge.sandbox for judge in self._judges if judge.sandbox), "")

    @property
    def grouped(self) -> bool:
        return any(judge.grouped for judge in self._judges)

    def gold(self, task: Task) -> Gold:
        """The reply from a function `gold` beside one of the rewards; Unscorable without one.

        A reply that one reward scores fully need not satisfy the others, so nothing is derived from the answer.
        """
        told = next((judge for judge in self._judges if judge.teller is not None), None)
        if told is None:
            return Unscorable("no function `gold` says which reply earns the full score of several rewards")
        return told.gold(task)

    async def __call__(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        judged = await asyncio.gather(*(judge(task, attempts) for judge in self._judges))
        return [weighted(self.names, self._weights, outcomes) for outcomes in zip(*judged, strict=True)]


def judge_of(
    rewards: Reward | Sequence[Reward],
    pool: RewardPool,
    *,
    weights: Sequence[float] = (),
    options: Mapping[str, Any] | None = None,
    source: Path | None = None,
) -> RewardJudge | SeveralRewards:
    """The judge for one reward, or for a list of rewards.

    options: further arguments; for a list, by the reward's name. source: see `RewardJudge`.
    Raises ConfigError when something does not fit.
    """
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        return RewardJudge(rewards, pool, options, source)
    names, options = told_apart([_named(reward) for reward in rewards]), options or {}
    if unknown := [key for key in options if key not in names or not isinstance(options[key], Mapping)]:
        raise ConfigError(
            f"reward_options.{unknown[0]}: of several rewards, options are a table by the reward's name, one of "
            f"{', '.join(names)}"
        )
    each = zip(rewards, names, strict=True)
    judges = [RewardJudge(reward, pool, options.get(name), source) for reward, name in each]
    return SeveralRewards(judges, names, weights or [1.0] * len(judges))


def _named(reward: Reward) -> tuple[str, str]:
    """The name of a reward, and the name of its file or module ("" if it has none)."""
    if isinstance(reward, str):
        place, _, name = reward.rpartition(":")
        return name, Path(place).stem if place and reward not in NAMED else ""
    name = name_of(reward)
    return name, str(getattr(reward, "__module__", "") or "").rpartition(".")[2].replace("__main__", "")


def weighted(names: Sequence[str], weights: Sequence[float], outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of one attempt from the outcomes of its rewards.

    If one reward fails, the result is its InfraError: a sum without that term would be a wrong score (I5).
    """
    if failed := [outcome for outcome in outcomes if isinstance(outcome, InfraError)]:
        return failed[0]
    scores = [(n, w, o) for n, w, o in zip(names, weights, outcomes, strict=True) if isinstance(o, Score)]
    if not scores:
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes if isinstance(outcome, Unscorable))
        return Unscorable("; ".join(reasons))
    parts = {name: score.value for name, _, score in scores}
    parts |= {f"{name}.{part}": own for name, _, score in scores for part, own in score.parts.items()}
    rows = [[weight * turn for turn in score.turns] for _, weight, score in scores]
    try:
        value = round(fsum(weight * score.value for _, weight, score in scores), DIGITS)
        return Score(value, parts, tuple(map(fsum, zip_longest(*rows, fillvalue=0.0))))
    except (ValueError, OverflowError):  # a score or a sum beyond every float
        return InfraError(f"the weighted sum of {', '.join(name for name, _, _ in scores)} is no finite number")


def told_apart(given: Sequence[tuple[str, str]]) -> list[str]:
    """Distinct names for several rewards, given as (function, file): the file's name only if needed."""
    names = Counter(name for name, _ in given)
    longer = [f"{file}.{name}" if file and (names[name] > 1 or name in TAKEN) else name for name, file in given]
    found, seen = [], Counter[str](TAKEN)
    for name in longer:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found
