"""Several reward functions as one judge, whose score is the weighted sum of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Gold
from tidemill.core.types import Outcome, Task, Trajectory, Unscorable
from tidemill.envs.judge import RewardJudge, Scorer
from tidemill.envs.rewards.named import NAMED
from tidemill.envs.rewards.signature import name_of
from tidemill.envs.rewards.weighted import alone_enough, told_apart, weighted

Reward = str | Callable[..., Any]


class SeveralRewards:
    """Judge that adds up the weighted outcomes of other judges."""

    def __init__(self, judges: Sequence[RewardJudge], names: Sequence[str], weights: Sequence[float]) -> None:
        self._judges, self.names, self._weights = judges, list(names), list(weights)

    def check(self, columns: set[str]) -> None:
        """Raise ConfigError when the tasks lack a column that one of the rewards needs."""
        for judge in self._judges:
            judge.check(columns)

    @property
    def name(self) -> str:
        return "+".join(self.names)

    @property
    def notes(self) -> list[str]:
        """The notes of each reward, and a warning when one reward alone can make an attempt solved."""
        found = [note for judge in self._judges for note in judge.notes]
        if enough := alone_enough(self.names, self._weights):
            found.append(
                f"accuracy counts a weighted sum of 1 or more, which {' or '.join(enough)} alone may reach: with "
                "reward_weights that add up to 1 it counts what every reward gives 1"
            )
        return found

    @property
    def grouped(self) -> bool:
        return any(judge.grouped for judge in self._judges)

    def gold(self, task: Task) -> Gold:
        """The reply from a function `gold` beside one of the rewards; Unscorable without one.

        A reply that one reward scores fully need not satisfy the others, so nothing is derived from the answer.
        """
        told = next((judge for judge in self._judges if judge.tells_gold), None)
        if told is None:
            return Unscorable("no function `gold` says which reply earns the full score of several rewards")
        return told.gold(task)

    async def __call__(self, task: Task, attempts: list[Trajectory]) -> list[Outcome]:
        judged = await asyncio.gather(*(judge(task, attempts) for judge in self._judges))
        return [weighted(self.names, self._weights, outcomes) for outcomes in zip(*judged, strict=True)]


def judge_of(
    rewards: Reward | Sequence[Reward],
    scorer: Scorer,
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
        return RewardJudge(rewards, scorer, options, source)
    names, options = told_apart([_named(reward) for reward in rewards]), options or {}
    if unknown := [key for key in options if key not in names or not isinstance(options[key], Mapping)]:
        raise ConfigError(
            f"reward_options.{unknown[0]}: of several rewards, options are a table by the reward's name, one of "
            f"{', '.join(names)}"
        )
    each = zip(rewards, names, strict=True)
    judges = [RewardJudge(reward, scorer, options.get(name), source) for reward, name in each]
    return SeveralRewards(judges, names, weights or [1.0] * len(judges))


def _named(reward: Reward) -> tuple[str, str]:
    """The name of a reward, and the name of its file or module ("" if it has none)."""
    if isinstance(reward, str):
        place, _, name = reward.rpartition(":")
        return name, Path(place).stem if place and reward not in NAMED else ""
    name = name_of(reward)
    return name, str(getattr(reward, "__module__", "") or "").rpartition(".")[2].replace("__main__", "")
