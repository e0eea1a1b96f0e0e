"""A trainer whose reference policy is served by engines of its own: they answer for "reference", the trainer for the rest.

    forward(rows, "reference") -> all rows at once -> a pool that nothing is published to -> as the trainer would answer

A reference that never moves is a function of tokens, so it does not matter who scores a row, or how often: one that was lost
with its engine is scored again, on another one or on the one that is started in its place.
"""

from __future__ import annotations

import asyncio

import numpy as np

from tidemill.controller.engine_pool import EnginePool
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Array, LossSpec, Metrics, Published, Sample, Telemetry, TrainResult, Version

REFERENCE, SERVED = "reference", "policy"  # what the trainer calls it, and what its engines call all that they serve


class WithServedReference:
    """`protocols.Trainer` over a trainer that holds no reference, and the engines that do."""

    def __init__(self, trainer: Trainer, engines: EnginePool) -> None:
        self._trainer, self._engines = trainer, engines

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        if policy != REFERENCE:
            return await self._trainer.forward(samples, policy)
        async with asyncio.TaskGroup() as group:
            scoring = [group.create_task(self._score(sample)) for sample in samples]
        return [each.result() for each in scoring]

    async def _score(self, row: Sample) -> Array:
        """[T] float32, as `Trainer.forward` has it: 0 where nothing was sampled and nothing has a weight."""
        if row.support is not None:
            raise ValueError(
                "a reference that is served scores over the whole vocabulary, and a row was sampled from a part of it: set "
                "placement.reference_engines = 0"
            )
        logprobs = np.zeros(len(row.tokens), np.float32)
        asked = np.flatnonzero(row.predicted)
        if asked.size:
            tokens = row.tokens[: asked[-1] + 1]
            scored = await self._engines.run(lambda engine: engine.score(tokens, SERVED, row.temperature, 0))
            logprobs[asked] = scored.logprobs[asked]
        return logprobs

    async def forward_backward(self, samples: list[Sample], losses: dict[str, LossSpec]) -> TrainResult:
        return await self._trainer.forward_backward(samples, losses)

    async def apply(self, scale: float) -> Metrics:
        return await self._trainer.apply(scale)

    async def publish(self, version: Version) -> Published:
        return await self._trainer.publish(version)

    async def snapshot(self) -> None:
        await self._trainer.snapshot()

    async def save(self, folder: str) -> None:
        await self._trainer.save(folder)

    async def load(self, folder: str) -> None:
        await self._trainer.load(folder)

    async def export(self, folder: str) -> None:
        await self._trainer.export(folder)

    async def telemetry(self) -> Telemetry:
        return await self._trainer.telemetry()

    async def close(self) -> None:
        await self._trainer.close()
