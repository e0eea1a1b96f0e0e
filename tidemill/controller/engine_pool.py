"""The engine pool: members that join, serve and leave, behind one engine for each group.

    join    joining -> its updates to the versions in force are verified -> serving
    drain   serving -> draining: no new request -> its requests ended, or were handed over -> gone
    loss    any state -> lost: its requests are asked of others; the supervisor lets a new member join
    sleep   all members at once: they keep their requests, and answer them after `wake`

A group's requests go to one member as long as that serves, because it holds their prefix in its cache. Then all of them
move to one other member. A publication goes to the members that serve at that moment, and ends when each has named the
fingerprint that was sent. Only then are slots released, which is what the lag bound counts on. Joining takes the same
lock, so a member never samples from a version older than the one in force when it began to serve. A run of several policies
publishes one after the other; one version of each is in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn, TypeVar

from tidemill.controller.first_cause import GRACE_S
from tidemill.controller.updates_in_force import UpdatesInForce
from tidemill.controller.weight_delivery import LOST, Delivery, SenderLost
from tidemill.core.errors import PolicyMismatch, WeightsMoved
from tidemill.core.interfaces import Capabilities, Engine, Trainer
from tidemill.core.types import Array, Completion, GenerateRequest, Scored, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.observability.stall_report import waiting

if TYPE_CHECKING:
    from tidemill.controller.policy_pools import Pool

T = TypeVar("T")


class MemberState(StrEnum):
    """The part that a member takes in the pool."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """An engine in the pool. Its name is free again once it has left."""

    name: str
    engine: Engine
    can: Capabilities  # as this engine said at its start
    state: MemberState = MemberState.JOINING
    groups: int = 0  # whose requests go to it
    in_flight: dict[asyncio.Timeout, Route] = field(default_factory=dict)  # requests; others get those that expire

    def hand_over(self) -> None:
        """Cancel the requests in flight here, so that they are asked of other members."""
        for request in self.in_flight:
            if not request.expired():
                request.reschedule(asyncio.get_running_loop().time())


def _raise(member: Member, loss: Exception) -> NoReturn:
    raise loss


class ContextShrank(Exception):
    """No member that serves has the context that this group began with: it begins anew with less."""


class EnginePool:
    """Several engines that act as one: see the module."""

    def __init__(self, members: Iterable[Member]) -> None:
        """Begin with these members. They serve at once, because nothing is published yet."""
        self._members = {member.name: member for member in members}
        if not self._members:
            raise ValueError("an engine pool needs at least one engine")
        for member in self._members.values():
            member.state = MemberState.SERVING
        self._lost: Callable[[str, str], None] | None = None
        self._changed = asyncio.Event()  # set, and replaced by a new one, at each change
        self._committing = asyncio.Lock()  # bounded: held for updates, which have deadlines
        self._updates = UpdatesInForce()
        self._trainer: Trainer | None = None  # that published them, and sends them again to members that join
        self._delivery = Delivery()
        self._asleep_since: float | None = None  # by the event loop's clock; None: awake
        self._slept = 0.0  # seconds, in sleeps that are over
        self._all_asleep = False
        self.context = 0  # tokens that every engine that serves can hold; the last known figure while none does
        self._tell()

    @property
    def members(self) -> list[Member]:
        """The members that join, serve or drain."""
        return list(self._members.values())

    @property
    def engines(self) -> list[Engine]:
        """The engines that serve or finish their last requests."""
        return [member.engine for member in self._members.values() if member.state is not MemberState.JOINING]

    @property
    def load(self) -> float:
        """Groups whose requests go to a member that serves, on average."""
        serving = self._serving()
        return sum(member.groups for member in serving) / max(len(serving), 1)

    @property
    def in_force(self) -> list[Version]:
        """The versions that the members serve, or commit just now: one of each policy that was published."""
        return self._updates.versions

    def supervised(self, lost: Callable[[str, str], None]) -> None:
        """Report lost members to `lost(name, reason)` instead of raising. The supervisor lets new ones join."""
        self._lost = lost

    async def run(self, work: Callable[[Route], Awaitable[T]]) -> T:
        """Do `work` with an engine whose requests go to one member, the least loaded, as long as that serves."""
        while True:
            route = Route(self)
            if self._serving():
                self._place(route)
            try:
                return await work(route)
            except ContextShrank:
                continue
            finally:
                route.leave()

    async def publish(self, published: WeightUpdate, trainer: Trainer | None = None) -> Version:
        """Have every member that serves, at least one, commit this version.

        trainer: sends it, if it is live; to members that join later, too, as long as it has these weights. Raises
        PolicyMismatch when one reports another version, and when a later step of its policy is in force. Of several policies
        only the last one of a step waits until a member serves, because the first one to join needs all of them.
        """
        async with self._committing:
            self._updates.begin(published)
            self._trainer = trainer
            self._tell()
            try:
                brought = await self._delivery.bring(published, self._serving(), trainer, self._lose)
                self._updates.replace(brought, published)
            except SenderLost as lost:
                assert lost.__cause__ is not None
                raise lost.__cause__ from None
        if self._updates.of_one_step:
            await self._until_one_serves()  # when all were lost: the first one to join has committed these versions
        return published.version

    def withdraw(self) -> list[Version]:
        """See `interfaces.Publisher`."""
        self._updates.withdraw()
        self._tell()
        return self.in_force

    async def sleep(self) -> None:
        """Have all members give their memory back, weights included, until `wake`. Those that join sleep at once."""
        async with self._committing:
            if self._asleep_since is None:
                self._asleep_since = asyncio.get_running_loop().time()
            if not self._all_asleep:
                await self._all(lambda engine: engine.sleep(weights=True))
                self._all_asleep = True

    async def wake(self) -> None:
        """Wake the members. They go on with the version in force, and with what they were asked before."""
        async with self._committing:
            if self._asleep_since is not None:
                self._all_asleep = False  # also if this is cut off
                await self._all(lambda engine: engine.wake())
                self._slept, self._asleep_since = self.slept_s(), None

    def slept_s(self) -> float:
        """Seconds that the members have slept so far; a limit on an attempt's time leaves them out."""
        since = self._asleep_since
        return self._slept + (0.0 if since is None else asyncio.get_running_loop().time() - since)

    def restore(self, update: WeightUpdate) -> None:
        """Let members join with a version in force again: another trainer came to the same weights."""
        self._updates.restore(update)
        self._tell()

    async def join(self, member: Member) -> None:
        """Bring a started engine to the versions in force; from then on it serves.

        Raises what its updates raise, and PolicyMismatch if it serves another version; it is then no member.
        """
        if member.name in self._members:
            raise ValueError(f"{member.name} is in the pool already: a new member needs a name of its own")
        self._members[member.name], brought = member, dict[str, Version]()
        try:
            while (gone := await self._caught_up(member, brought)) is not None:
                await self._follows(gone)
        except BaseException:
            self._remove(member, MemberState.LOST)
            raise
        member.state = MemberState.SERVING
        self._tell()

    async def drain(self, name: str, *, hand_over: bool = False) -> None:
        """Send a member no more requests, wait for the end of those in flight, and let it leave.

        hand_over: cancel those instead, and ask them of other members; a second call may so hurry a first one. Raises
        ValueError if it does not serve, or if it is the only one that does.
        """
        member, others = self._members.get(name), [each for each in self._serving() if each.name != name]
        if member is None or member.state is MemberState.JOINING:
            names = ", ".join(each.name for each in others) or "none"
            raise ValueError(f"drain({name!r}): it does not serve, so it cannot be drained; these serve: {names}")
        if not others:
            raise ValueError(f"drain({name!r}): no other engine serves; let another one join first")
        member.state = MemberState.DRAINING
        if hand_over:
            member.hand_over()
        await self._until(
            lambda: not member.in_flight or member.state is not MemberState.DRAINING, name, "its last requests"
        )
        self._remove(member, MemberState.GONE)

    def drop(self, name: str) -> None:
        """Take out a member whose process has ended; its requests are asked of others."""
        if member := self._members.get(name):
            self._remove(member, MemberState.LOST)

    async def ask(self, route: Route, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Have the route's member do `work`, and another one again if that is lost or hands over its requests."""
        while True:
            member, asked = await self._member_for(route), None
            try:
                async with asyncio.Timeout(None) as asked:  # the engine's call has a deadline; this expires at a hand-over
                    member.in_flight[asked] = route
                    try:
                        return await work(member.engine)
                    finally:
                        del member.in_flight[asked]
                        if member.state is MemberState.DRAINING:
                            self._tell()
            except LOST as loss:
                self._lose(member, loss)
            except TimeoutError:
                if asked is None or not asked.expired():  # of the engine, not of the hand-over
                    raise

    async def abort(self, route: Route, key: str) -> None:
        """End the requests of this key on the members that may have any of this route."""
        asked = [each for each in self._members.values() if each is route.member or route in each.in_flight.values()]
        for member in asked:
            try:
                await member.engine.abort(key)
            except LOST as loss:
                self._lose(member, loss)

    async def _member_for(self, route: Route) -> Member:
        """The member that this route's next request goes to."""
        while (member := route.member) is None or member.state is not MemberState.SERVING:
            await self._until_one_serves()
            self._place(route)
        return member

    def _place(self, route: Route) -> None:
        """Send the route's requests to the member with the fewest groups that has the context for them."""
        fitting = [member for member in self._serving() if member.can.context >= route.context]
        if not fitting:
            raise ContextShrank
        route.move(min(fitting, key=lambda member: member.groups))

    async def _until_one_serves(self) -> None:
        await self._until(lambda: bool(self._serving()), "engines", "one that serves")

    async def _follows(self, gone: WeightUpdate) -> None:
        """Wait for weights after these, or for these once more from another trainer."""
        await self._until(lambda: self._updates.follows(gone), "the trainer", "the next version")

    async def _until(self, condition: Callable[[], bool], peer: str, what: str) -> None:
        if not condition():
            with waiting(peer, what):
                while not condition():
                    await self._changed.wait()  # bounded: requests have deadlines, and restarts a budget

    def _serving(self) -> list[Member]:
        return [member for member in self._members.values() if member.state is MemberState.SERVING]

    async def _all(self, work: Callable[[Engine], Awaitable[None]]) -> None:
        members = [member for member in self._members.values() if member.state is not MemberState.JOINING]
        await asyncio.gather(*(self._attempt(member, lambda member: work(member.engine)) for member in members))

    async def _attempt(self, member: Member, work: Callable[[Member], Awaitable[None]]) -> None:
        try:
            await work(member)
        except LOST as loss:
            self._lose(member, loss)

    async def _caught_up(self, member: Member, brought: dict[str, Version]) -> WeightUpdate | None:
        """Bring a joining member to the versions in force. Returns one of them if its weights are gone.

        brought: the versions that it has had so far, by policy; kept up to date.
        """
        async with self._committing:  # after a publication that is under way
            for told in self._updates.lacking(brought):
                if self._updates.is_gone(told) or not await self._brought(member, told):
                    return told
                brought[told.version.policy] = told.version
            if self._asleep_since is not None:
                await member.engine.sleep(weights=True)
            return None

    async def _brought(self, member: Member, told: WeightUpdate) -> bool:
        """Bring a joining member to a version; False if its weights are gone, and the next version is to be waited for."""
        try:
            self._updates.replace(await self._delivery.bring(told, [member], self._trainer, _raise), told)
        except WeightsMoved:
            return False  # the next version is on its way
        except (PolicyMismatch, SenderLost):
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._until(lambda: self._updates.is_gone(told), "the trainer", "its end")
            if not self._updates.is_gone(told):
                raise
            return False
        return True

    def _lose(self, member: Member, loss: Exception) -> None:
        if member.state in (MemberState.GONE, MemberState.LOST):
            return  # known: another request was the first to notice
        if self._lost is None:
            raise loss
        self._remove(member, MemberState.LOST)
        self._lost(member.name, str(loss).partition("\n")[0])

    def _remove(self, member: Member, state: MemberState) -> None:
        if self._members.get(member.name) is member:
            del self._members[member.name]
            member.state = state
            member.hand_over()
            self._tell()

    def _tell(self) -> None:
        """Take note that a member has changed, and wake whoever waits for that."""
        self.context = min((member.can.context for member in self._serving()), default=self.context)
        self._changed.set()
        self._changed = asyncio.Event()


class Route:
    """The engine of one group: its requests go to one member of the pool, as long as that serves."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool, self.context = pool, pool.context  # tokens that a sequence of the group may have
        self.member: Member | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._pool.ask(self, lambda engine: engine.generate(request))

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        return await self._pool.ask(self, lambda engine: engine.score(tokens, policy, temperature, top_k))

    async def abort(self, key: str) -> None:
        await self._pool.abort(self, key)

    def move(self, member: Member) -> None:
        """Send all further requests to this member."""
        self.leave()
        self.member = member
        member.groups += 1

    def leave(self) -> None:
        if self.member is not None:
            self.member.groups -= 1
            self.member = None


class PoolPublisher:
    """`interfaces.Publisher` from one trainer to a pool."""

    def __init__(self, trainer: Trainer, pool: Pool, tell: Callable[[Version, str], None] | None = None) -> None:
        """Publish from `trainer` to `pool`.

        tell: called once for each reason why a version holds the same weights as the one before.
        """
        self._trainer, self._pool, self._tell = trainer, pool, tell
        self._told: set[str] = set()

    async def publish(self, version: Version) -> Version:
        published = await self._trainer.publish(version)
        served = await self._pool.publish(published, self._trainer)
        if published.note and self._tell is not None and published.note not in self._told:
            self._told.add(published.note)
            self._tell(served, published.note)
        return served

    def withdraw(self) -> list[Version]:
        return self._pool.withdraw()
