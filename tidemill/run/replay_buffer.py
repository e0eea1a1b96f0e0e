"""Groups that are trained once more: of those that the latest steps trained, the ones that had the most to teach.

    ledger (what each step was made of, what it earned, what was trained again) -> choose(step) -> groups

A group is worth the standard deviation of its rewards: where all attempts earn the same there is nothing to compare. It is
a function of the record alone, so nothing has to be kept for a resume. What is trained again is outside the bound on
staleness, on purpose: it may be `within` steps older. Its logprobs are those of the policy that sampled it, so ratios and
corrections treat it as what it is. One whose payload cannot be read any more is passed over, and that is recorded.
"""

from __future__ import annotations

import numpy as np

from tidemill.core.types import Group
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import PayloadLost
from tidemill.run.recipe import ReplaySettings


class Experience:
    def __init__(self, ledger: SqliteLedger, settings: ReplaySettings, groups: int) -> None:
        """groups: a step's fresh ones, of which `settings.share` is how many come on top."""
        self._ledger, self._settings, self._count = ledger, settings, int(settings.share * groups)
        self._lost = set[int]()  # what was found to be unreadable

    def choose(self, step: int) -> list[int]:
        """The ids of what `step` is to train again, the most valuable first; of equals the latest."""
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
