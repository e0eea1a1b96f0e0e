"""Checks of recorded attempts: each row agrees with itself, and the rows of one attempt with one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidemill.core.token_extras import expect_aligned
from tidemill.core.types import Group, Trajectory


def check_row(t: Trajectory) -> None:
    """Raise ValueError when the record of a row contradicts itself."""
    shape = t.tokens.shape
    if t.tokens.ndim != 1 or any(a.shape != shape for a in (t.mask, t.logprobs, t.versions)):
        raise ValueError("trajectory arrays differ in shape")
    if not np.isfinite(t.logprobs).all() or (t.logprobs[t.mask] > 1e-4).any():
        raise ValueError("trajectory has a sampled token without a finite logprob <= 0")
    if (t.versions[t.mask] < 0).any() or (t.versions[~t.mask] != -1).any():
        raise ValueError("trajectory versions do not match its mask")
    if set(t.versions[t.mask].tolist()) != {v.step for v in t.sources}:
        raise ValueError("trajectory versions do not match its sources")
    if len({v.policy for v in t.sources}) > 1:
        raise ValueError("trajectory has tokens of several policies")
    if (given := t.given) is not None and (given.shape != shape or given.dtype != bool or (given & t.mask).any()):
        raise ValueError("trajectory has given tokens that are no tokens of it, or that were sampled")
    expect_aligned(t.extras, len(t.tokens), "a trajectory")
    if t.support is not None:
        t.support.check(t.sampled)


def expect_one_outcome(group: Group) -> None:
    """Raise ValueError when a row has an outcome and is not the last one of its attempt."""
    if len(ends := group.ends) == len(group.trajectories):
        return
    for t in group.trajectories:
        if t.outcome is not None and all(t is not end for end in ends):
            raise ValueError(
                f"attempt {t.sample} of group {group.id} has an outcome on another row than its last: give each attempt a "
                "`sample` number of its own, and put the attempt's one outcome on its last row"
            )


def check_attempts(group: Group) -> None:
    """Raise ValueError when an attempt of several rows has not one outcome, or would train a token twice."""
    if len(group.ends) == len(group.trajectories) and all(t.parent is None for t in group.trajectories):
        return
    expect_one_outcome(group)
    for rows in group.attempts:
        name = f"attempt {rows[0].sample} of group {group.id}"
        for place, t in enumerate(rows):
            check_row(t)
            if t.parent is not None:
                _check_fork(f"row {place} of {name}", t, t.parent, rows[:place])


def _check_fork(name: str, t: Trajectory, parent: tuple[int, int], before: Sequence[Trajectory]) -> None:
    row, position = parent
    if not 0 <= row < len(before):
        raise ValueError(f"{name} names row {row} as its parent: expected an earlier row of the same attempt")
    if not 0 < position <= len(t.tokens) or not np.array_equal(t.tokens[:position], before[row].tokens[:position]):
        raise ValueError(f"{name} does not begin with the first {position} tokens of its parent, row {row}")
    if t.learnt[:position].any():
        raise ValueError(
            f"{name} marks tokens before its fork at {position} as its own: its parent trains them, here they are context"
        )
