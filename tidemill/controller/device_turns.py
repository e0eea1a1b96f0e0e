"""Turns on a device that trainer and engines share: one has its memory while the other computes.

    engines' turn    rollouts, evaluations, probes                the trainer's moments and gradients are on the host
    trainer's turn   gradient, update, checkpoint, publication    engines sleep, and what they are asked waits

The trainer's turn begins when all groups of its step have finished, and ends when every engine has its new weights. Groups
of later steps pause meanwhile. None of them is needed to end the turn, so nobody waits for what cannot come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidemill.controller.engine_pool import EnginePool
from tidemill.core.interfaces import Trainer


class DeviceTurns:
    """The turns on a shared device, the engines' first."""

    def __init__(self, trainer: Trainer | None = None, pool: EnginePool | None = None) -> None:
        """Without arguments both compute at the same time, and every turn is both's."""
        self._trainer, self._pool = trainer, pool
        self._trainers = False  # whose turn it is

    @property
    def taken(self) -> bool:
        """True where trainer and engines take turns."""
        return self._pool is not None

    async def trainer(self) -> None:
        """Give the device to the trainer. Nothing may wait for an engine until `engines`."""
        if self._trainer is not None and self._pool is not None and not self._trainers:
            await self._pool.sleep()
            await self._trainer.wake()
            self._trainers = True

    async def of_new_trainer(self) -> None:
        """Give the device to a trainer that is to be started: it begins awake."""
        if self._pool is not None:
            await self._pool.sleep()
            self._trainers = True

    async def engines(self) -> None:
        """Give the device to the engines."""
        if self._trainer is not None and self._pool is not None:
            await self._trainer.sleep()
            await self._pool.wake()
            self._trainers = False

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Context within the trainer's turn in which engines have the device."""
        await self.engines()
        yield
        await self.trainer()

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Context in which the trainer has the device, whosever turn it is."""
        back = self.taken and not self._trainers
        await self.trainer()
        yield
        if back:
            await self.engines()
