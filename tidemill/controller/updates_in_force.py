"""The updates in force of an engine pool: the latest of each policy, and whether its weights can still be read.

publication -> begin | withdraw (the trainer is lost) -> restore, or begin by the next trainer
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate


class UpdatesInForce:
    """The latest update of each policy."""

    def __init__(self) -> None:
        self._latest: dict[str, WeightUpdate] = {}  # by policy
        self._gone = set[str]()  # policies whose weights cannot be read any more: members join with their next versions

    @property
    def versions(self) -> list[Version]:
        """One version of each policy that was published."""
        return [update.version for update in self._latest.values()]

    @property
    def of_one_step(self) -> bool:
        """False while versions of other policies are to come: without them a member may be unable to join."""
        return len({(each.incarnation, each.step) for each in self.versions}) < 2 and not self._gone

    def begin(self, update: WeightUpdate) -> None:
        """Take note of a publication. Raises PolicyMismatch when a later step of its policy is in force."""
        before = self._latest.get(policy := update.version.policy)
        if before is not None and update.version.step < before.version.step:
            raise PolicyMismatch(f"{update.version} would follow {before.version}: engines never step back")
        self._latest[policy] = update
        self._gone.discard(policy)

    def withdraw(self) -> None:
        """Take note that nothing of what was published can be read any more."""
        self._gone = set(self._latest)

    def restore(self, update: WeightUpdate) -> None:
        """Take note that another trainer came to the weights of a version in force."""
        assert update.version in self.versions
        self.begin(update)

    def replace(self, update: WeightUpdate, instead_of: WeightUpdate) -> None:
        """Bring later members to a version by this update, if it is still in force."""
        if self._latest.get(policy := update.version.policy) is instead_of:
            self._latest[policy] = update

    def is_gone(self, update: WeightUpdate) -> bool:
        """True when the weights of an update's policy cannot be read any more."""
        return update.version.policy in self._gone

    def follows(self, update: WeightUpdate) -> bool:
        """True when an update of the same policy is in force instead of this one, and can be read."""
        return not self.is_gone(update) and self._latest[update.version.policy] is not update

    def lacking(self, brought: Mapping[str, Version]) -> list[WeightUpdate]:
        """The updates to bring to a member that has these versions, by policy; those that are gone first."""
        left = [each for policy, each in self._latest.items() if self.is_gone(each) or brought.get(policy) != each.version]
        return sorted(left, key=lambda each: not self.is_gone(each))
