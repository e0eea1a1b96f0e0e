"""Delivery of live weights to the pool: one rendezvous, one rule for what fails, and members that join later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from tidemill.controller.engine_pool import EnginePool, Member, MemberState, PoolPublisher
from tidemill.controller.weight_delivery import AGAIN
from tidemill.core.errors import EngineFailed, PeerDied, PolicyMismatch, TransferFailed, WeightsMoved
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate

LIVE = (WeightPart("live", "here", 10, live=True),)


@dataclass
class Meeting:
    """The processes of one group, by rank. It is whole when all have come, and fails for all when one fails."""

    size: int
    here: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    async def exchange(self, *ranks: int) -> None:
        assert not (self.broken and 0 in ranks), "a group that broke is used again"
        if self.broken:
            raise TransferFailed("another one failed")
        self.here |= set(ranks)
        self.changed.set()
        try:
            async with asyncio.timeout(30):
                while len(self.here) < self.size:
                    if self.broken:
                        raise TransferFailed("another one failed")
                    self.changed.clear()
                    await self.changed.wait()
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        self.broken = True
        self.changed.set()


@dataclass
class Wire:
    groups: dict[str, Meeting] = field(default_factory=dict)

    def joined(self, update: WeightUpdate) -> Meeting:
        meets = update.rendezvous
        assert meets is not None
        return self.groups.setdefault(meets.group, Meeting(meets.receivers + 1))


@dataclass
class Sends:
    """A trainer that offers versions, and sends the one that it has."""

    wire: Wire
    has: int = -1
    sent: list[str] = field(default_factory=list)
    fault: Callable[[], None] | None = None

    async def publish(self, version: Version) -> WeightUpdate:
        self.has = version.step
        return WeightUpdate(Version(version.step, fingerprint=f"f{version.step}"), LIVE)

    async def send(self, update: WeightUpdate) -> str:
        if self.fault:
            fault, self.fault = self.fault, None
            fault()
        if update.version.step != self.has:
            raise WeightsMoved("moved")
        assert update.rendezvous is not None
        self.sent.append(update.rendezvous.group)
        try:
            await self.wire.joined(update).exchange(0)
        except TransferFailed as error:
            return str(error)
        return ""


@dataclass
class Receives:
    wire: Wire
    ranks: int = 1
    serves: Version = Version(-1)  # noqa: RUF009
    faults: list[BaseException] = field(default_factory=list)  # of the next updates
    told: int = 0

    async def update(self, update: WeightUpdate) -> Version:
        self.told += 1
        meeting = self.wire.joined(update)
        assert update.rendezvous is not None
        first = update.rendezvous.first
        if self.faults:
            fault = self.faults.pop(0)
            if not isinstance(fault, (PeerDied, EngineFailed)):
                meeting.fail()
            raise fault
        await meeting.exchange(*range(first, first + self.ranks))
        self.serves = update.version
        return update.version


class Scene:
    def __init__(self, *ranks: int) -> None:
        self.wire = Wire()
        self.engines = [Receives(self.wire, each) for each in ranks]
        self.trainer = Sends(self.wire)
        self.lost: list[str] = []
        self.pool = EnginePool([self.member(i) for i in range(len(ranks))])
        self.pool.supervised(lambda name, why: self.lost.append(f"{name}: {why}"))
        self.publisher = PoolPublisher(self.trainer, self.pool)  # type: ignore[arg-type]

    def member(self, i: int) -> Member:
        return Member(f"engine-{i}", self.engines[i], Capabilities(99, receivers=self.engines[i].ranks))  # type: ignore[arg-type]

    def added(self) -> Member:
        self.engines.append(Receives(self.wire))
        return self.member(len(self.engines) - 1)

    async def publish(self, step: int) -> None:
        for meeting in self.wire.groups.values():
            meeting.here.clear()
        assert (await self.publisher.publish(Version(step))).step == step

    def lose_trainer(self) -> NoReturn:
        """End the trainer in the middle of a transfer."""
        for meeting in self.wire.groups.values():
            meeting.fail()
        raise PeerDied("trainer", "was killed")

    @property
    def serve(self) -> list[int]:
        return [each.serves.step for each in self.engines]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def test_all_meet_once_and_the_same_ones_keep_their_group() -> None:
    async def main() -> None:
        scene = Scene(1, 2, 1)  # the second one has two tensor-parallel ranks
        await scene.publish(0)
        await scene.publish(1)
        assert scene.serve == [1, 1, 1] and len(set(scene.trainer.sent)) == 1
        await scene.pool.drain("engine-0")
        await scene.publish(2)
        assert scene.serve == [1, 2, 2] and len(set(scene.trainer.sent)) == 2, "other members are another group"

    run(main())


@pytest.mark.parametrize("loss", [PeerDied("engine-0", "was killed"), EngineFailed("cannot go on")])
def test_a_lost_engine_leaves_and_the_others_are_told_again_by_another_group(loss: Exception) -> None:
    async def main() -> None:
        scene = Scene(1, 1, 1)
        scene.engines[0].faults = [loss]
        await scene.publish(0)
        assert scene.serve == [-1, 0, 0] and len(scene.lost) == 1 and "engine-0" in scene.lost[0]
        assert [each.told for each in scene.engines] == [1, 2, 2]
        assert len(set(scene.trainer.sent)) == len(scene.trainer.sent)

    run(main())


def test_an_engine_that_received_nothing_is_told_again_and_is_lost_in_the_end() -> None:
    async def main() -> None:
        scene = Scene(1, 1)
        scene.engines[0].faults = [TransferFailed("a wire was cut")]
        await scene.publish(0)
        assert scene.serve == [0, 0] and not scene.lost
        scene.engines[0].faults = [TransferFailed("a wire was cut")] * (1 + AGAIN)
        await scene.publish(1)
        assert len(scene.lost) == 1 and "engine-0: received no weights" in scene.lost[0]
        assert scene.serve == [0, 1], "the other one is no victim of it"

    run(main())


def test_refused_weights_end_the_publication_for_all() -> None:
    async def main() -> None:
        scene = Scene(1, 1)
        scene.engines[0].faults = [PolicyMismatch("another fingerprint")]
        with pytest.raises(PolicyMismatch, match="another fingerprint"):
            await scene.publish(0)
        assert scene.serve == [-1, -1] and not scene.lost

    run(main())


def test_the_loss_of_the_trainer_is_raised_and_no_engine_is_lost() -> None:
    async def main() -> None:
        scene = Scene(1, 1)
        await scene.publish(0)
        scene.trainer.fault = scene.lose_trainer
        with pytest.raises(PeerDied, match="trainer"):
            await scene.publish(1)
        assert scene.serve == [0, 0] and not scene.lost

    run(main())


def test_one_that_joins_is_sent_the_version_in_force_alone() -> None:
    async def main() -> None:
        scene = Scene(1, 1)
        await scene.publish(0)
        told = [each.told for each in scene.engines]
        member = scene.added()
        await scene.pool.join(member)
        assert scene.serve == [0, 0, 0] and [each.told for each in scene.engines] == [*told, 1]
        await scene.publish(1)
        assert scene.serve == [1, 1, 1] and len(set(scene.trainer.sent)) == 3

    run(main())


def test_one_that_joins_between_an_update_and_its_publication_waits_for_that() -> None:
    async def main() -> None:
        scene = Scene(1)
        await scene.publish(0)
        scene.trainer.has = 1  # it has taken its step
        member = scene.added()
        joining = asyncio.ensure_future(scene.pool.join(member))
        while scene.engines[1].told == 0:
            await asyncio.sleep(0)
        assert member.state is MemberState.JOINING
        await scene.publish(1)
        await joining
        assert scene.serve == [1, 1] and member.state is MemberState.SERVING

    run(main())


def test_one_that_joins_while_the_trainer_is_lost_waits_for_the_next_one() -> None:
    async def main() -> None:
        scene = Scene(1)
        await scene.publish(0)
        scene.trainer.fault = scene.lose_trainer
        joining = asyncio.ensure_future(scene.pool.join(scene.added()))
        while scene.engines[1].told == 0:
            await asyncio.sleep(0)
        scene.pool.withdraw()
        await scene.publish(1)
        await joining
        assert scene.serve == [1, 1] and not scene.lost

    run(main())


def test_a_joining_engine_that_is_lost_is_no_member() -> None:
    async def main() -> None:
        scene = Scene(1)
        await scene.publish(0)
        for fault in (PeerDied("engine-1", "was killed"), TransferFailed("cut")):
            member = scene.added()
            scene.engines[-1].faults = [fault] * (1 + AGAIN)
            with pytest.raises((PeerDied, EngineFailed)):
                await scene.pool.join(member)
            assert [each.name for each in scene.pool.members] == ["engine-0"]
            await scene.publish(scene.trainer.has + 1)

    run(main())


def test_a_publication_that_is_cancelled_ends_both_sides() -> None:
    async def main() -> None:
        scene = Scene(1, 1)
        scene.engines[1].ranks = 0  # never comes with a rank of its own: all wait
        publishing = asyncio.ensure_future(scene.publish(0))
        while not all(each.told for each in scene.engines):
            await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert all(each.broken for each in scene.wire.groups.values())
        scene.engines[1].ranks = 1
        await scene.publish(1)
        assert scene.serve == [1, 1]

    run(main())
