"""The attempts of a step: their rows, and the arrays that advantages read of their scores.

Every number is one of an attempt or of a token. The tokens of an attempt are those of all its rows, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tidemill.core.types import GREEDY, Array, Group, Score, Trajectory


class Attempt(NamedTuple):
    """One attempt of a step."""

    group: Group
    end: Trajectory  # its last row, which holds its outcome and finish
    rows: Sequence[Trajectory]  # those that have something to learn

    @property
    def mask(self) -> Array:
        """[T] bool: the tokens that the policy sampled, of one row after another."""
        return self.rows[0].mask if len(self.rows) == 1 else np.concatenate([t.mask for t in self.rows])

    @property
    def learnt(self) -> int:
        return sum(int(t.learnt.sum()) for t in self.rows)


Attempts = Sequence[Attempt]


def longest_reply(mask: Array) -> int:
    """The number of tokens in the longest reply: the longest stretch of sampled tokens."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def baseline(group: Group) -> float | None:
    """The reward of the greedy attempt; None if it has no score."""
    return next((t.reward for t in group.ends if t.sample == GREEDY and isinstance(t.outcome, Score)), None)


def by_turn(attempts: Attempts) -> tuple[Array | None, Array]:
    """([M] turns' rewards, each at its turn's last token, or None; [M] each token's turn)."""
    turns, given, some = [np.zeros(0, np.int64)], [np.zeros(0)], False
    for each in attempts:
        assert isinstance(each.end.outcome, Score)
        scored, mask = each.end.outcome.turns, each.mask
        begins = mask & ~np.concatenate(([False], mask[:-1]))
        own = np.cumsum(begins)[mask] - 1
        rewards = np.zeros(len(own))
        ends = np.flatnonzero(np.append(np.diff(own), 1))
        rewards[ends[: len(scored)]] = scored
        turns.append(own)
        given.append(rewards)
        some = some or bool(scored)
    return np.concatenate(given) if some else None, np.concatenate(turns)


def by_seat(advantage: str, attempts: Attempts) -> tuple[Array, Array]:
    """([M] each token's seat, [n, seats] the rewards of the attempts' seats; NaN where an attempt has no such seat)."""
    seats = [np.repeat(t.seat, t.learnt.sum()) for each in attempts for t in each.rows]
    rewards = np.full((len(attempts), 1 + max((t.seat for each in attempts for t in each.rows), default=0)), np.nan)
    for own, (group, end, rows) in zip(rewards, attempts, strict=True):
        there = sorted({t.seat for t in rows})
        given = end.outcome.seats if isinstance(end.outcome, Score) else ()
        if len(given) <= there[-1]:
            raise ValueError(
                f"advantage = {advantage!r} compares the seats of an attempt, and a score of group {group.id} rewards "
                f"{len(given)} of {there[-1] + 1}: use an environment that scores several seats, or another advantage"
            )
        own[there] = np.array(given)[there]
    return np.concatenate(seats) if seats else np.zeros(0, np.int64), rewards
