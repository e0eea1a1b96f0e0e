"""Counts groups that were dropped in a row, and names the cause in one sentence.

a dropped group and its reason -> Drops -> cause() -> why nothing is left to train on, and what to do
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidemill.core.outcomes import SOLVED
from tidemill.core.types import GREEDY, TRUNCATED, Finish, Group, Score

FLAT = "zero-variance"  # groups whose rewards are all equal; every other reason means a group with nothing to train on


@dataclass(slots=True)
class Drops:
    """The groups that were dropped since the latest one that was kept."""

    count: int = 0
    _kinds: Counter[str] = field(default_factory=Counter)
    _reasons: Counter[str] = field(default_factory=Counter)  # of attempts without a score

    def add(self, group: Group, reason: str) -> None:
        """Count a dropped group. reason: `Algorithm.drop_reason`'s."""
        self.count += 1
        self._kinds[_flat(group) if reason == FLAT else _untrained(group, reason)] += 1
        self._reasons.update(
            t.outcome.reason for t in group.ends if t.outcome is not None and not isinstance(t.outcome, Score)
        )

    def cause(self) -> str:
        """One sentence that names each kind of dropped group, the commonest first, and a remedy for it."""
        (first, _), *_ = found = self._kinds.most_common()
        parts = [f"{count:,} {_SAID.get(kind, kind)}" for kind, count in found]
        if self._kinds["unscored"]:
            parts.append(f"the commonest reason is {self._reasons.most_common(1)[0][0]!r}" if self._reasons else "")
        return f"{self.count:,} groups in a row were dropped: {', '.join(filter(None, parts))}; {_ADVICE.get(first, _LOOK)}"


def _flat(group: Group) -> str:
    rewards = [t.reward for t in group.ends if isinstance(t.outcome, Score) and t.sample != GREEDY]
    if all(reward >= SOLVED for reward in rewards):
        return "solved"
    return "alike" if any(reward > 0 for reward in rewards) else "unsolved"


def _untrained(group: Group, reason: str) -> str:
    scored = [t for t in group.ends if isinstance(t.outcome, Score) and t.sample != GREEDY]
    if not scored:
        return "unscored"
    if all(t.finish is Finish.CANCELLED for t in scored):
        return "cancelled"
    if all(t.finish in TRUNCATED for t in scored):
        return "cut"
    greedy = [t for t in group.ends if t.sample == GREEDY]
    return "no baseline" if greedy and not any(isinstance(t.outcome, Score) for t in greedy) else reason


_SAID = {
    "solved": "with every attempt right",
    "unsolved": "with every attempt wrong",
    "alike": "with equal rewards for all attempts",
    "unscored": "without a score",
    "cancelled": "whose attempts were cancelled",
    "cut": "whose attempts were all cut off, which algorithm.overlong leaves out",
    "no baseline": "whose greedy attempt, the baseline, has no score",
}
_REWARD = "`tidemill reward test RECIPE` shows what the reward says"
_LOOK = "`tidemill samples RUN` shows the attempts"
_ADVICE = {
    "solved": "use harder tasks, or algorithm.zero_variance = 'keep'",
    "unsolved": "use easier tasks, a warm-up, or algorithm.zero_variance = 'keep'",
    "alike": "use a reward with steps in between, a higher rollout.group_size, or algorithm.zero_variance = 'keep'",
    "unscored": f"the reward or the environment gives no score; {_REWARD}",
    "cut": "raise the limit that cuts them (rollout.max_tokens or engine.context), or set algorithm.overlong",
    "no baseline": f"the reward or the environment gives it no score; {_REWARD}",
}
