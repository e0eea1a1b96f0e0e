"""Rows, as the trainer takes them: a trajectory becomes one, and numbers of its trained tokens go in and come out.

    a trajectory -> row_of -> its row;  [T] of each row -> flat -> [M], of the trained tokens -> by_row -> [T] of each row

What these numbers mean is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tidemill.types import Array, Group, LossSpec, Sample, Trajectory

POLICY, REFERENCE, CRITIC, SUPERVISED = "policy", "reference", "critic", "supervised"
Logprobs = Mapping[str, Sequence[Array]]
"""Whose ("policy", "reference") -> [T] of each row; of the "critic" its values"""


def row_of(group: Group, trajectory: Trajectory, step: int | None) -> Sample:
    """Without advantages and weights yet; with lags where a step is given. Raises ValueError for greedy samples."""
    if trajectory.temperature <= 0:
        raise ValueError(
            f"group {group.id} was sampled at temperature {trajectory.temperature}: greedy tokens have no logprob "
            "to train on; sample at a temperature > 0"
        )
    mask, nothing = trajectory.mask, np.zeros(trajectory.tokens.shape, np.float32)
    given = trajectory.given
    return Sample(
        tokens=trajectory.tokens,
        mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantages=nothing,
        weights=nothing if given is None else given.astype(np.float32),  # so that a forward pass tells of them
        loss=POLICY,
        temperature=trajectory.temperature,
        lags=None if step is None else np.where(mask, step - trajectory.versions, 0).astype(np.int32),
        support=trajectory.support,
        group=group.id,
        sample=trajectory.sample,
    )


def ended(row: Sample) -> Sample:
    """The row with a place after its last token, which alone is trained: there a head says what it thinks of the whole."""
    names = ("tokens", "mask", "logprobs", "versions", "advantages")
    longer = {name: np.append(values := getattr(row, name), values.dtype.type(0)) for name in names}
    return replace(row, **longer, weights=np.append(np.zeros_like(row.weights), np.float32(1)))


def flat(rows: Sequence[Sample], values: Sequence[Array]) -> Array:
    """[M] float64: those of the trained tokens, row after row."""
    parts = [np.asarray(each, np.float64)[row.predicted] for row, each in zip(rows, values, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)


def by_row(rows: Sequence[Sample], values: Array) -> Iterator[Array]:
    """`flat`, undone: [T] float32 of each row, 0 where nothing was sampled."""
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
    """The rows with their advantages [M], weights [n] and what else is known of their tokens."""
    for i, (row, own) in enumerate(zip(rows, by_row(rows, advantages), strict=True)):
        weight = np.where(row.predicted, np.float32(weights[i]), np.float32(0))
        others = {name: values[i] for name, values in known.items() if values is not None}
        yield replace(row, advantages=own, weights=weight, **others)


def supervised(rows: Sequence[tuple[Array, Array]]) -> tuple[list[Sample], dict[str, LossSpec], float]:
    """Samples, losses and scale of a cross-entropy step on `(tokens [T] int32, loss_mask [T] bool)`: a mean over tokens.

    Nothing was sampled, so `mask` is all False; only `weights` say what is trained.
    """
    samples, trained = [], 0
    for tokens, loss_mask in rows:
        tokens, loss_mask = np.asarray(tokens, np.int32), np.asarray(loss_mask, bool)
        if tokens.shape != loss_mask.shape or tokens.ndim != 1:
            raise ValueError(f"tokens {tokens.shape} and loss_mask {loss_mask.shape}: expected one flag a token")
        if loss_mask[:1].any():
            raise ValueError("loss_mask[0] is set: nothing predicts a row's first token; put a prompt or BOS before it")
        nothing = np.zeros(tokens.shape, np.float32)
        unknown = np.full(tokens.shape, -1, np.int32)
        weights = loss_mask.astype(np.float32)
        none_sampled = np.zeros(tokens.shape, bool)
        samples.append(Sample(tokens, none_sampled, nothing, unknown, nothing, weights, loss=SUPERVISED))
        trained += int(loss_mask.sum())
    return samples, {SUPERVISED: LossSpec("cross_entropy")}, 1.0 / trained if trained else 0.0
