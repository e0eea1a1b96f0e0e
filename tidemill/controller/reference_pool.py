"""A trainer whose reference policy is served by engines of its own.

    forward(rows, "reference") -> all rows at once -> a pool that nothing is published to -> as the trainer would answer

The engines answer for "reference", the trainer for everything else. A reference that never moves is a function of tokens,
so it does not matter which engine scores a row, or how often. A row that was lost with its engine is scored again, on
another engine or on the restarted one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tidemill.controller.engine_pool import EnginePool
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Array, Sample

REFERENCE, SERVED = "reference", "policy"  # the trainer's name for it, and the name under which its engines serve it


class WithServedReference:
    """`interfaces.Trainer` over a trainer without a reference, and the engines that serve it."""

    def __init__(self, trainer: Trainer, engines: EnginePool) -> None:
        self._trainer, self._engines = trainer, engines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)  # everything but `forward` is the trainer's own

    async def forward(self, samples: list[Sample], policy: str = "policy") -> list[Array]:
        if policy != REFERENCE:
            return await self._trainer.forward(samples, policy)
        async with asyncio.TaskGroup() as group:
            scoring = [group.create_task(self._score(sample)) for sample in samples]
        return [each.result() for each in scoring]

    async def _score(self, row: Sample) -> Array:
        """Logprobs of one row, [T] float32 as `Trainer.forward` returns them.

        They are 0 where nothing was sampled and nothing has a weight. Raises ValueError for a row that was sampled from a
        part of the vocabulary.
        """
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
