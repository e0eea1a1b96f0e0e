"""The rollout pool: several engines that act as one.

A group lives on one engine, so that its siblings share the prompt's KV pages, and goes to the engine with the fewest live
groups. A version is published when every engine serves it and all name the same fingerprint; only then are slots released,
which is what the lag bound counts on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tidemill.protocols import Engine, PolicyMismatch, Trainer
from tidemill.types import Version


class EnginePool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a rollout pool needs at least one engine")
        self.engines = list(engines)
        self._load = [0] * len(self.engines)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Engine]:
        """The least loaded engine, counted as loaded by one more group while the context is open."""
        index = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[index] += 1
        try:
            yield self.engines[index]
        finally:
            self._load[index] -= 1


class PoolPublisher:
    """`protocols.Publisher` from one trainer to a pool."""

    def __init__(self, trainer: Trainer, pool: EnginePool) -> None:
        self._trainer, self._pool = trainer, pool

    async def publish(self, version: Version) -> Version:
        published = await self._trainer.publish(version)
        served = await asyncio.gather(*(engine.update(published) for engine in self._pool.engines))
        for index, each in enumerate(served):
            if each != published.version:
                raise PolicyMismatch(f"engine {index} serves {each} ({each.fingerprint}), published was {published.version}")
        return published.version
