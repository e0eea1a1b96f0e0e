"""Several reward functions as one judge: each is called as if it were alone, and the weighted sum is the score."""

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
    """A `Judge` of others, whose outcomes are added up."""

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
        """How accuracy is to be read where one reward alone makes an attempt count as solved, and those of each reward."""
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
        """What a function `gold` beside one of them says: what pleases one reward need not please the others."""
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
    """The judge of one reward, or of a list of them.

    options: further arguments; those of a list by the reward's name. source: see `RewardJudge`.
    Raises ConfigError when they do not fit.
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
    """A reward's own name, and that of the file it is from."""
    if isinstance(reward, str):
        place, _, name = reward.rpartition(":")
        return name, Path(place).stem if place and reward not in NAMED else ""
    name = name_of(reward)
    return name, str(getattr(reward, "__module__", "") or "").rpartition(".")[2].replace("__main__", "")
