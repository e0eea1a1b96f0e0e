"""Symptoms of a policy that goes wrong, each reported once per run with its remedy.

They are found in a step's groups and figures. A policy that has learnt its tasks answers the same each time, with little
entropy and equal rewards; that is no symptom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.core.outcomes import SOLVED
from tidemill.core.types import Array, Group, Metrics, Trajectory
from tidemill.observability.diagnosis.cuts import REMEDIES, by, limits

MOST = 0.5  # share of the groups that are identical
SATURATED, TRUNCATED = 0.2, 0.2  # share of the tokens, share of the attempts
COLLAPSED = 0.1  # share of the first step's entropy, for a policy that solves nothing
MASTERED = 0.75  # share of the groups in which every attempt is right
RECENT = 0.1  # weight of the latest step in the share that is solved


@dataclass(slots=True)
class Symptoms:
    """The symptoms of one run. `told`: the kinds that were reported already."""

    told: dict[str, str] = field(default_factory=dict)
    _entropy: float | None = None  # entropy of the first step
    _solved: float | None = None  # share of the attempts that solve their task, over the latest steps

    def look(self, groups: Sequence[Group], figures: Metrics) -> list[str]:
        """Sentences on the symptoms that are new at this step; none if no policy sampled the groups."""
        if all(t.given is not None for group in groups for t in group.trajectories):
            return []
        self._solved = _averaged(self._solved, groups)
        found = {kind: text for kind, text in self._all(groups, figures) if kind not in self.told}
        self.told |= found
        return list(found.values())

    def _all(self, groups: Sequence[Group], figures: Metrics) -> Iterator[tuple[str, str]]:
        if (share := _identical(groups)) > MOST:
            yield (
                "identical completions",
                f"in {share:.0%} of the groups all attempts fail alike, token by token: nothing can be learnt from them. "
                "Raise rollout.temperature, or begin with a model that is less certain",
            )
        flat, count = figures.get("train/zero_variance_groups", 0.0), figures.get("train/groups", 0.0)
        if count and flat == count and (not groups or sum(map(_mastered, groups)) < MASTERED * len(groups)):
            yield (
                "no advantages",
                "the rewards of every group of this step are all equal, so it has no gradient: take easier or harder tasks, "
                "more attempts a task (rollout.group_size), or a reward with steps in between",
            )
        entropy = figures.get("train/entropy")
        if entropy is not None and self._entropy is None:
            self._entropy = entropy
        if entropy is not None and self._entropy is not None and entropy < self._least(self._entropy):
            yield (
                "entropy collapse",
                f"the entropy has fallen from {self._entropy:.3g} to {entropy:.3g} nats a token: it hardly explores. "
                "Raise algorithm.clip_high or algorithm.entropy, lower trainer.lr, or take harder tasks",
            )
        if (clipped := figures.get("train/clipped", 0.0)) > SATURATED:
            yield (
                "ratio saturation",
                f"{clipped:.0%} of the tokens are clipped: the policy is far from the one that sampled. Lower trainer.lr or "
                "max_lag, or take a loss that keeps their gradient (aipo, cispo)",
            )
        if (cut := figures.get("train/truncated", 0.0)) > TRUNCATED:
            yield "truncation", _truncation(cut, groups)
        if (only := _only_environment(groups)) is not None:
            yield (
                "one environment",
                f"only the tasks of {only!r} have attempts that differ in reward: the others train nothing. Look at their "
                "rewards (tidemill reward test), their difficulty and their weights",
            )

    def _least(self, entropy: float) -> float:
        """The entropy below which a policy hardly explores; it falls as the policy solves more tasks."""
        return COLLAPSED * entropy * (1 - (self._solved or 0.0))


def _averaged(before: float | None, groups: Sequence[Group]) -> float | None:
    """The share of scored attempts that solve their task, averaged over the latest steps."""
    rewards = [reward for group in groups for reward in _scored(group)]
    if not rewards:
        return before
    share = float(np.mean([reward >= SOLVED for reward in rewards]))
    return share if before is None else (1 - RECENT) * before + RECENT * share


def _scored(group: Group) -> Array:
    """The rewards of the attempts that have a score."""
    return (rewards := group.rewards)[~np.isnan(rewards)]


def _mastered(group: Group) -> bool:
    """True if every attempt that has a score solves the task."""
    return bool(len(rewards := _scored(group)) and (rewards >= SOLVED).all())


def _truncation(share: float, groups: Sequence[Group]) -> str:
    found = limits(t for group in groups for t in group.ends)
    kind, limit = by(found) if found else ("recipe", "")
    remedy = REMEDIES[kind]
    said = f"{share:.0%} of the attempts were cut off{limit}: their rewards are of half an answer"
    return f"{said}. {remedy[0].upper()}{remedy[1:]}, or set algorithm.overlong"


def _identical(groups: Sequence[Group]) -> float:
    """The share of groups (of several attempts that reply) with one and the same unsolved reply."""
    replied = [(group, [r for rows in group.attempts if (r := _replies(rows))]) for group in groups]
    same = [len(set(replies)) == 1 and not _mastered(group) for group, replies in replied if len(replies) > 1]
    return float(np.mean(same)) if same else 0.0


def _replies(rows: Sequence[Trajectory]) -> bytes:
    return b"".join(t.tokens[t.mask].tobytes() for t in rows)


def _only_environment(groups: Sequence[Group]) -> str | None:
    """The only environment with differing rewards; None if there are several, or others are all solved."""
    varied = {group.task.env: False for group in groups}
    for group in groups:
        varied[group.task.env] |= bool(len(rewards := _scored(group)) > 1 and np.ptp(rewards) > 0)
    alone = [env for env, has in varied.items() if has]
    others = [group for group in groups if group.task.env not in alone]
    return alone[0] if len(alone) == 1 and not all(map(_mastered, others)) else None
