"""Replay buffer: picks groups of recent steps that are worth training once more.

A group is worth the standard deviation of its rewards. The choice is a function of the record alone, so a resume needs
nothing else. Replayed groups are outside the bound on staleness, on purpose: they may be `within` steps older. Ratios and
corrections account for their age. A group whose payload cannot be read any more is passed over, which is recorded.
"""

from __future__ import annotations

import numpy as np

from tidemill.core.errors import PayloadLost
from tidemill.core.types import Group
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe_tables import ReplaySettings


class Experience:
    """Chooser of replayed groups. Call it with a step to load that step's groups."""

    def __init__(self, ledger: SqliteLedger, settings: ReplaySettings, count: int) -> None:
        """Replay at most `count` groups a step."""
        self._ledger, self._settings, self._count = ledger, settings, count
        self._lost = set[int]()  # groups that could not be read

    def choose(self, step: int) -> list[int]:
        """The ids of the groups that `step` is to replay, the most valuable first, then the latest."""
        return self._ranked(step)[: self._count]

    def __call__(self, step: int) -> list[Group]:
        found = list[Group]()
        for group_id in self._ranked(step):
            if len(found) == self._count:
                break
            try:
                found.append(self._ledger.load(group_id))
            except PayloadLost as error:
                if group_id not in self._lost:
                    self._lost.add(group_id)
                    self._ledger.event("payload_lost", {"group": group_id, "reason": str(error)})
        return found

    def _ranked(self, step: int) -> list[int]:
        known = self._ledger.experience(max(0, step - self._settings.within), step) if self._count else []
        worth = [(float(np.std(rewards)), group_id) for group_id, rewards, uses in known if uses < self._settings.times]
        return [group_id for value, group_id in sorted(worth, reverse=True) if value > 0]
