"""Rows for the trainer, and conversion between arrays by row and flat arrays.

    a trajectory -> row_of -> its row;  [T] of each row -> flat -> [M], of the trained tokens -> by_row -> [T] of each row

The meaning of the numbers plays no role here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tidemill.core.types import Array, Group, Sample, Trajectory

POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
Logprobs = Mapping[str, Sequence[Array]]
"""Policy name ("policy", "reference") -> [T] logprobs of each row; "critic" -> its values."""


class ByAttempt:
    """Base of arrays over M tokens of n attempts, attempt by attempt and row by row."""

    __slots__ = ()
    lengths: Array  # [n] int64, >= 1

    @property
    def starts(self) -> Array:
        """[n] index of the first token of each attempt."""
        return np.cumsum(self.lengths) - self.lengths

    def spread(self, values: Array) -> Array:
        """[M] the attempts' values [n], repeated for each token."""
        return np.repeat(values, self.lengths)

    def per_attempt(self, values: Array) -> Array:
        """[n] sums over the tokens of each attempt."""
        return np.add.reduceat(values, self.starts)


def row_of(group: Group, trajectory: Trajectory, step: int | None) -> Sample:
    """The trainer's row of a trajectory, without advantages and weights yet.

    step: for each token's lag. Raises ValueError for a greedy sample, which has no logprob to train on.
    """
    if trajectory.temperature <= 0:
        raise ValueError(
            f"group {group.id} was sampled at temperature {trajectory.temperature}: greedy tokens have no logprob "
            "to train on; sample at a temperature > 0"
        )
    mask, given, nothing = trajectory.mask, trajectory.given, np.zeros(trajectory.tokens.shape, np.float32)
    return Sample(
        tokens=trajectory.tokens,
        mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantages=nothing,
        weights=nothing if given is None else given.astype(np.float32),  # so that a forward pass returns their logprobs
        policy=trajectory.policy,
        loss=POLICY,
        temperature=trajectory.temperature,
        lags=None if step is None else np.where(mask, step - trajectory.versions, 0).astype(np.int32),
        support=trajectory.support,
        group=group.id,
        attempt=trajectory.sample,
        extras=trajectory.extras,
    )


def ended(row: Sample) -> Sample:
    """The row with one more position at its end, the only one trained: a head scores the row there."""
    names = ("tokens", "mask", "logprobs", "versions", "advantages")
    longer = {name: np.append(values := getattr(row, name), values.dtype.type(0)) for name in names}
    return replace(row, **longer, weights=np.append(np.zeros_like(row.weights), np.float32(1)), extras={})


def flat(rows: Sequence[Sample], values: Sequence[Array]) -> Array:
    """[M] float64 values of the trained tokens, row after row."""
    parts = [np.asarray(each, np.float64)[row.predicted] for row, each in zip(rows, values, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)


def by_row(rows: Sequence[Sample], values: Array) -> Iterator[Array]:
    """The inverse of `flat`: [T] float32 for each row, 0 where nothing is trained."""
    end = 0
    for row in rows:
        where = row.predicted
        start, end = end, end + int(where.sum())
        own = np.zeros(row.tokens.shape, np.float32)
        own[where] = values[start:end]
        yield own


def filled(
    rows: Sequence[Sample], advantages: Array, weights: Array, known: Mapping[str, Sequence[Array] | None]
) -> Iterator[Sample]:
    """The rows with their advantages [M], a weight for each row, and other arrays per row."""
    for i, (row, own) in enumerate(zip(rows, by_row(rows, advantages), strict=True)):
        weight = np.where(row.predicted, np.float32(weights[i]), np.float32(0))
        others = {name: values[i] for name, values in known.items() if values is not None}
        yield replace(row, advantages=own, weights=weight, **others)
