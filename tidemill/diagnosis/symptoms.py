"""What is going wrong with a policy, from a step's groups and figures: each symptom is told of once, with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.diagnosis.cuts import REMEDIES, by, limits
from tidemill.types import Group, Metrics

MOST = 0.5  # of the groups: not by chance
SATURATED, TRUNCATED = 0.2, 0.2  # of the tokens, of the attempts
COLLAPSED = 0.1  # of the entropy of the first step


@dataclass(slots=True)
class Symptoms:
    """Of one run. `told`: the kinds that were told of."""

    told: dict[str, str] = field(default_factory=dict)
    _entropy: float | None = None  # of the first step

    def look(self, groups: Sequence[Group], figures: Metrics) -> list[str]:
        """What this step shows for the first time. figures: as in metrics.jsonl. Nothing where no policy sampled."""
        if all(t.given is not None for group in groups for t in group.trajectories):
            return []
        found = {kind: text for kind, text in self._all(groups, figures) if kind not in self.told}
        self.told |= found
        return list(found.values())

    def _all(self, groups: Sequence[Group], figures: Metrics) -> Iterator[tuple[str, str]]:
        if (share := _identical(groups)) > MOST:
            yield (
                "identical completions",
                f"in {share:.0%} of the groups all attempts are the same, token by token: nothing can be learnt from them. "
                "Raise rollout.temperature, or begin with a model that is less certain",
            )
        flat, count = figures.get("train/zero_variance_groups", 0.0), figures.get("train/groups", 0.0)
        if count and flat == count:
            yield (
                "no advantages",
                "the rewards of every group of this step are all equal, so it has no gradient. Where all attempts are right "
                "there is no more to learn; else take easier or harder tasks, more attempts a task (rollout.group_size), "
                "or a reward with steps in between",
            )
        entropy = figures.get("train/entropy")
        if entropy is not None and self._entropy is None:
            self._entropy = entropy
        if entropy is not None and self._entropy is not None and entropy < COLLAPSED * self._entropy:
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


def _truncation(share: float, groups: Sequence[Group]) -> str:
    found = limits(t for group in groups for t in group.trajectories)
    kind, limit = by(found) if found else ("recipe", "")
    remedy = REMEDIES[kind]
    said = f"{share:.0%} of the attempts were cut off{limit}: their rewards are of half an answer"
    return f"{said}. {remedy[0].upper()}{remedy[1:]}, or set algorithm.overlong"


def _identical(groups: Sequence[Group]) -> float:
    """Share of the groups, among those of several attempts with a reply, whose attempts are all the same."""
    replied = [[t for t in group.trajectories if t.mask.any()] for group in groups]
    same = [len({t.tokens[t.mask].tobytes() for t in attempts}) == 1 for attempts in replied if len(attempts) > 1]
    return float(np.mean(same)) if same else 0.0


def _only_environment(groups: Sequence[Group]) -> str | None:
    """The one environment of several whose groups have rewards that differ, if it is one."""
    varied = {group.task.env: False for group in groups}
    for group in groups:
        rewards = group.rewards[~np.isnan(group.rewards)]
        varied[group.task.env] |= bool(len(rewards) > 1 and np.ptp(rewards) > 0)
    alone = [env for env, has in varied.items() if has]
    return alone[0] if len(varied) > 1 and len(alone) == 1 else None
