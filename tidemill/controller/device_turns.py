"""Turns on a device that trainer and engines share: one has its memory while the other computes.

    engines' turn    rollouts, evaluations, probes
    trainer's turn   gradient, update, checkpoint, publication        engines sleep, and what they are asked waits

The trainer's turn begins when all groups of its step have finished, and ends when every engine has its new weights. Groups
of later steps pause meanwhile. None of them is needed to end the turn, so nobody waits for what cannot come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidemill.controller.engine_pool import EnginePool


class DeviceTurns:
    """The turns on a shared device, the engines' first."""

    def __init__(self, pool: EnginePool | None = None) -> None:
        """pool: None where both compute at the same time; then every turn is both's."""
        self._pool = pool

    @property
    def taken(self) -> bool:
        """True where trainer and engines take turns."""
        return self._pool is not None

    async def trainer(self) -> None:
        """Give the device to the trainer. Nothing may wait for an engine until `engines`."""
        if self._pool is not None:
            await self._pool.sleep()

    async def engines(self) -> None:
        """Give the device to the engines."""
        if self._pool is not None:
            await self._pool.wake()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Context within the trainer's turn in which engines have the device."""
        await self.engines()
        yield
        await self.trainer()
