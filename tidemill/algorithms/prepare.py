"""Groups in, a step's samples out: advantages on the sampled tokens, the reduction's weights, one scale.

A trajectory trains when it has a Score, was not cancelled and holds a sampled token; every other one is left out of the
statistics, of the gradient and of its denominators (I5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.algorithms.advantages import ADVANTAGES
from tidemill.algorithms.reduce import reduction
from tidemill.algorithms.settings import AlgorithmSettings
from tidemill.types import TRUNCATED, Array, Finish, Group, LossSpec, Metrics, Sample, Score, Trajectory

POLICY, SUPERVISED = "policy", "supervised"


@dataclass(frozen=True, slots=True)
class Prepared:
    samples: list[Sample]
    losses: dict[str, LossSpec]
    scale: float  # for `Trainer.apply`
    metrics: Metrics


class Algorithm:
    """The settings, as what the controller asks of an algorithm."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def drop_reason(self, group: Group) -> str | None:
        return has_signal(group, self.settings)

    @property
    def recomputes(self) -> bool:
        return self.settings.old_logprobs == "recompute"

    def prepare(self, groups: Sequence[Group]) -> Prepared:
        return prepare(groups, self.settings)


def has_signal(group: Group, settings: AlgorithmSettings) -> str | None:
    """Why this group is not worth a step, or None: "unscored" (nothing to train on) or "zero-variance"."""
    if not any(_trains(t) for t in group.trajectories):
        return "unscored"
    if settings.zero_variance == "drop" and not _advantages(group, settings).any():
        return "zero-variance"
    return None


def prepare(groups: Sequence[Group], settings: AlgorithmSettings) -> Prepared:
    """The samples of one step, in the order of the groups. Raises ValueError for what cannot be trained on."""
    rows = [
        (group, trajectory, float(advantage))
        for group in groups
        for trajectory, advantage in zip(group.trajectories, _advantages(group, settings), strict=True)
        if _trains(trajectory)
    ]
    lengths = np.array([t.sampled for _, t, _ in rows], np.int64)
    prompts = np.array([g.id for g, _, _ in rows], np.int64)
    weights, scale = reduction(settings.reduction, lengths, prompts, settings.fixed_length)
    samples = [_sample(g, t, a, float(w)) for (g, t, a), w in zip(rows, weights, strict=True)]
    return Prepared(samples, {POLICY: settings.loss_spec()}, scale, _metrics(groups, rows, settings))


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


def _trains(trajectory: Trajectory) -> bool:
    scored = isinstance(trajectory.outcome, Score) and trajectory.finish is not Finish.CANCELLED
    return scored and bool(trajectory.mask.any())


def _advantages(group: Group, settings: AlgorithmSettings) -> Array:
    """[n] float64, one a trajectory. Siblings are compared within their seat: the parts of a game are not alike."""
    rewards = np.array([t.reward if _trains(t) else np.nan for t in group.trajectories], np.float64)
    seats = np.array([t.seat for t in group.trajectories], np.int64)
    advantages = np.zeros_like(rewards)
    for seat in np.unique(seats):
        advantages[seats == seat] = ADVANTAGES[settings.advantage](rewards[seats == seat])
    return advantages


def _sample(group: Group, trajectory: Trajectory, advantage: float, weight: float) -> Sample:
    if trajectory.temperature <= 0:
        raise ValueError(
            f"group {group.id} was sampled at temperature {trajectory.temperature}: greedy tokens have no logprob "
            "to train on; sample at a temperature > 0"
        )
    mask = trajectory.mask
    return Sample(
        tokens=trajectory.tokens,
        mask=mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        weights=np.where(mask, np.float32(weight), np.float32(0)),
        loss=POLICY,
        temperature=trajectory.temperature,
        group=group.id,
        sample=trajectory.sample,
    )


def _metrics(
    groups: Sequence[Group], rows: Sequence[tuple[Group, Trajectory, float]], settings: AlgorithmSettings
) -> Metrics:
    attempts = sum(len(g.trajectories) for g in groups)
    rewards = np.array([t.reward for _, t, _ in rows] or [0.0])
    lengths = np.array([t.sampled for _, t, _ in rows] or [0])
    flat = sum(not _advantages(g, settings).any() for g in groups)
    metrics = {
        "groups": float(len(groups)),
        "samples": float(len(rows)),
        "unscored": float(attempts - len(rows)),
        "zero_variance_groups": float(flat),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": sum(t.finish in TRUNCATED for _, t, _ in rows) / max(len(rows), 1),
    }
    parts = [t.outcome.parts for _, t, _ in rows if isinstance(t.outcome, Score)]
    for name in sorted({name for part in parts for name in part}):
        metrics[f"reward/{name}"] = float(np.mean([part[name] for part in parts if name in part]))
    return metrics
