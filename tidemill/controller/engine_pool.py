"""The rollout pool: several engines that act as one, and may come and go.

    work -> the least loaded engine that is up; if the engine is lost -> the same work again, on another one
    publish -> every engine that is up commits; one that is lost meanwhile is left out
    admit -> an engine that was started (again) is brought to the present version, then it is up

A group lives on one engine, so that its siblings share the prompt's KV pages. A version is published when every engine that
is up serves it and all name the same fingerprint; only then are slots released, which is what the lag bound counts on. An
engine that comes back commits the present version under the same lock, so it never samples from an older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tidemill.core.errors import EngineFailed, PeerLost, PolicyMismatch, RemoteError
from tidemill.core.interfaces import Engine, Trainer
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.observability.stall_report import waiting

T = TypeVar("T")
LOST = (PeerLost, EngineFailed, RemoteError)  # an engine is lost: another one repeats its work


@dataclass(slots=True)
class Member:
    """A place in the pool, with its engine while that is up."""

    index: int
    engine: Engine | None  # None: it is down
    load: int = 0  # groups


class EnginePool:
    """Several engines that act as one: see the module."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a rollout pool needs at least one engine")
        self._members = [Member(i, engine) for i, engine in enumerate(engines)]
        self._lost: Callable[[int, str], None] | None = None
        self._changed = asyncio.Condition()  # bounded: nothing waits while it holds it
        self._committing = asyncio.Lock()  # bounded: held for updates, which have deadlines
        self._published: WeightUpdate | None = None

    @property
    def engines(self) -> list[Engine]:
        """The engines that are up."""
        return [member.engine for member in self._members if member.engine is not None]

    def supervised(self, lost: Callable[[int, str], None]) -> None:
        """Report lost engines to `lost(index, reason)` instead of raising.

        The supervisor brings the engine back by `admit`.
        """
        self._lost = lost

    async def run(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Do `work` on the least loaded engine; do it again on another one if the engine is lost."""
        while True:
            member, engine = await self._least_loaded()
            member.load += 1
            try:
                return await work(engine)
            except LOST as loss:
                self._down(member, engine, loss)
            finally:
                member.load -= 1

    async def publish(self, published: WeightUpdate) -> Version:
        """Have every engine that is up, at least one, serve this version.

        Raises PolicyMismatch when an engine reports another version.
        """
        async with self._committing:
            self._published = published
            up = [(member, member.engine) for member in self._members if member.engine is not None]
            await asyncio.gather(*(self._commit(member, engine, published) for member, engine in up))
        await self._least_loaded()  # when all were lost: the first one to come back has committed this version
        return published.version

    async def admit(self, index: int, engine: Engine) -> None:
        """Bring a newly started engine to the present version, then let it join."""
        member = self._members[index]
        async with self._committing:
            if self._published is not None:
                await self._update(index, engine, self._published)
            member.engine = engine
        async with self._changed:
            self._changed.notify_all()

    def drop(self, index: int) -> None:
        """Take an engine that has ended out of the pool."""
        self._members[index].engine = None

    async def _commit(self, member: Member, engine: Engine, published: WeightUpdate) -> None:
        try:
            await self._update(member.index, engine, published)
        except LOST as loss:
            self._down(member, engine, loss)

    async def _update(self, index: int, engine: Engine, published: WeightUpdate) -> None:
        served = await engine.update(published)
        if served != published.version:
            raise PolicyMismatch(f"engine {index} serves {served} ({served.fingerprint}), published was {published.version}")

    def _down(self, member: Member, engine: Engine, loss: Exception) -> None:
        if self._lost is None:
            raise loss
        if member.engine is engine:  # the first to notice
            member.engine = None
            self._lost(member.index, str(loss).partition("\n")[0])

    async def _least_loaded(self) -> tuple[Member, Engine]:
        """The engine with the fewest groups. Waits while all are down, until the supervisor restarts one."""
        if not self.engines:
            async with self._changed:
                with waiting("engines", "one that is up"):
                    await self._changed.wait_for(lambda: self.engines)  # bounded: by the budget of restarts
        member = min((m for m in self._members if m.engine is not None), key=lambda m: m.load)
        assert member.engine is not None
        return member, member.engine


class PoolPublisher:
    """`interfaces.Publisher` from one trainer to a pool."""

    def __init__(self, trainer: Trainer, pool: EnginePool, tell: Callable[[Version, str], None] | None = None) -> None:
        """Publish from `trainer` to `pool`.

        tell: called once for each reason why a version holds the same weights as the one before.
        """
        self._trainer, self._pool, self._tell = trainer, pool, tell
        self._told: set[str] = set()

    async def publish(self, version: Version) -> Version:
        published = await self._trainer.publish(version)
        served = await self._pool.publish(published)
        if published.note and self._tell is not None and published.note not in self._told:
            self._told.add(published.note)
            self._tell(served, published.note)
        return served
