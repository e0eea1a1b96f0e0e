"""Admission slots and the finished groups that wait for the trainer (bounds age, I2).

A group holds one slot from its admission until the engines hold the weights of the step that trained on it; a dropped
group gives its slot back at once. With P groups a step and a window of W ids (1 <= W <= max_lag * P + 1) there are
B = (max_lag + 1) * P - W + 1 slots, and nothing that is trained on is more than max_lag versions old.

Proof. Let g be admitted while the engines hold version v. The groups that steps v, v+1, ... train on before g are, first,
those that hold a slot when g is admitted, at most B - 1 (a step whose weights are published has released its slots),
and, second, those that overtake g, at most W - 1 (only ids in [head, head + W) are taken, and head <= g while g waits).
That is at most (max_lag + 1) * P - 1 groups, hence at most max_lag whole steps, so g is in step v + max_lag or before.
Every token of g was sampled by v or later.

A step with n places left may also take any of the n oldest waiting groups, whatever the window (`take(places)`). Taking
such an x, beyond the window of an older waiting g, cannot push g into a later step: fewer than n groups wait before x, g
among them, so the n - 1 places that are left suffice for all of them. Later picks keep this true: those by order are again
among the oldest that the places suffice for, and those by window have ids below x, so they are counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.core.types import Group


class Buffer:
    """Admission slots, and the finished groups that wait for the trainer."""

    def __init__(
        self,
        *,
        batch: int,
        max_lag: int,
        window: int = 1,
        total: int | None = None,
        next_id: int = 0,
        live: Sequence[int] = (),
    ) -> None:
        """Open a buffer for steps of `batch` groups (P) with a window of `window` ids (W).

        total: how many groups are still to be trained on, or None. No more than that are admitted, dropped ones not
        counted, so that nothing is sampled for a step that will not come. When a run goes on, `live` are the ids that
        were admitted and have no fate yet, in order (they hold slots), and `next_id` is the first new one.
        """
        if batch < 1 or max_lag < 0:
            raise ValueError(f"batch={batch}, max_lag={max_lag}: expected batch >= 1 and max_lag >= 0")
        if not 1 <= window <= max_lag * batch + 1:
            raise ValueError(f"window={window}: expected 1..{max_lag * batch + 1} (max_lag * batch + 1)")
        self.batch, self.window, self.max_lag = batch, window, max_lag
        self.slots = (max_lag + 1) * batch - window + 1
        self._live: OrderedDict[int, Group | None] = OrderedDict.fromkeys(live)  # admitted, not yet taken; oldest first
        self.used = len(self._live)  # slots in use: groups that were admitted and not yet released or dropped
        self.next_id = next_id  # of the next group to be admitted
        self._quota = None if total is None else total - len(self._live)  # groups that may still be admitted
        self._changed = asyncio.Condition()  # bounded: nothing waits while it holds it

    @property
    def ready(self) -> int:
        """The number of finished groups that wait for the trainer."""
        return sum(group is not None for group in self._live.values())

    def takeable(self, places: int = 1) -> bool:
        """True when `take(places)` would return at once."""
        return self._candidate(places) is not None

    async def admit(self) -> int:
        """Wait for a slot and return the id of the group that may now be rolled out."""
        async with self._changed:
            # bounded: slots come back with each publication, whose calls have deadlines
            await self._changed.wait_for(lambda: self.used < self.slots and (self._quota is None or self._quota > 0))
            self.used += 1
            if self._quota is not None:
                self._quota -= 1
            group_id = self.next_id
            self.next_id += 1
            self._live[group_id] = None
            return group_id

    async def put(self, group: Group) -> None:
        """Store a finished group. Raises ValueError when its id was not admitted, or was put before."""
        async with self._changed:
            if self._live.get(group.id, group) is not None:  # a stranger's default is the group itself
                raise ValueError(f"group {group.id} was not admitted, or was put before")
            self._live[group.id] = group
            self._changed.notify_all()

    async def drop(self, group_id: int) -> None:
        """Give up a group that will not be trained on, and free its slot at once."""
        async with self._changed:
            del self._live[group_id]
            self.used -= 1
            if self._quota is not None:
                self._quota += 1
            self._changed.notify_all()

    async def take(self, places: int = 1) -> Group:
        """Wait for the oldest finished group that may be trained on next, and remove it.

        It is among the `window` ids that start at the oldest one still waiting, or among the `places` oldest ones.
        places: how many groups the step still needs, if their order does not matter.
        """
        async with self._changed:
            # bounded: an episode and its judging have limits
            await self._changed.wait_for(lambda: self._candidate(places) is not None)
            group = self._candidate(places)
            assert group is not None
            del self._live[group.id]
            self._changed.notify_all()
            return group

    async def settled(self) -> None:
        """Wait until nothing is being rolled out, and nothing more may be until slots are released."""
        async with self._changed:
            # bounded: an episode and its judging have limits
            await self._changed.wait_for(lambda: (self.used == self.slots or self._quota == 0) and all(self._live.values()))

    async def release(self, count: int) -> None:
        """Free `count` slots: the engines hold the weights of the step that trained on those groups."""
        async with self._changed:
            if count > self.used:
                raise ValueError(f"release({count}) with {self.used} slots in use")
            self.used -= count
            self._changed.notify_all()

    def _candidate(self, places: int) -> Group | None:
        if not self._live:
            return None
        head = next(iter(self._live))
        for place, (group_id, group) in enumerate(self._live.items()):
            if group_id >= head + self.window and place >= places:
                return None
            if group is not None:
                return group
        return None
