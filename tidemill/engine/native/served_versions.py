"""The versions that an engine has served: of one policy, or of several side by side.

A policy has a number here, and a version an epoch: its place among all that were served, by which tokens are stamped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from tidemill.core.errors import PolicyMismatch
from tidemill.core.policy_version import PolicyKey
from tidemill.core.types import Version
from tidemill.engine.request_refusals import check_forward, check_policy


class ServedVersions:
    """Every version served so far, and the present one of each policy."""

    def __init__(self, first: Sequence[Version], cached: int, frozen: Collection[str] = ()) -> None:
        """first: the version of each policy at the start. cached: how many recent versions of a policy keep their prefix
        cache. frozen: policies that are never updated."""
        self.every = [*first]  # by epoch
        self.epochs = np.arange(len(first))  # of the present versions, by the policy's number
        self.latest = first[0]  # that was committed
        self.numbers = {version.policy: number for number, version in enumerate(first)}
        assert len(self.numbers) == len(first), "two policies have one name"
        self._frozen = frozenset(frozen)
        self._recent = [deque([version.key], maxlen=cached) for version in first]

    @property
    def recent(self) -> set[PolicyKey]:
        """The versions whose prefix cache is kept."""
        return {key for keys in self._recent for key in keys}

    def number(self, policy: str, engine: str) -> int:
        """The number of a policy. Raises ValueError if it is not served."""
        check_policy(policy, self.numbers, engine)
        return self.numbers[policy]

    def present(self, policy: int) -> Version:
        """The version of a policy that is served now."""
        return self.every[self.epochs[policy]]

    def of(self, policy: str) -> Version | None:
        """The version of a policy that is served now, if it is served."""
        number = self.numbers.get(policy)
        return None if number is None else self.present(number)

    def expect_next(self, new: Version, engine: str) -> None:
        """Raise PolicyMismatch unless `new` may follow: its policy is served and updated here, and it is not older."""
        if (before := self.of(new.policy)) is None:
            served = ", ".join(str(self.present(number)) for number in self.numbers.values())
            raise PolicyMismatch(f"{new} is not of the policy that engine {engine} serves ({served})")
        if new.policy in self._frozen:
            raise PolicyMismatch(f"{new} would update a frozen policy, which engine {engine} serves as it is in its folder")
        check_forward(new, before, engine)

    def commit(self, new: Version) -> int:
        """Note that `new` is served from now on. Returns the number of its policy."""
        policy = self.numbers[new.policy]
        if new != self.present(policy):  # otherwise these are weights that were given back, and have come again
            self.epochs[policy] = len(self.every)
            self.every.append(new)
            self._recent[policy].append(new.key)
        self.latest = new
        return policy
