"""Updates of a vLLM server's weights: every rank stages and verifies, loads, and is read back."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.core.errors import BaseMissing, PolicyMismatch, TransferFailed
from tidemill.core.types import InFlight
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.remote.server_updates import ServerUpdater, Updated
from tidemill.engine.vllm.server_routes import LONG_S, ServerRoutes, as_text, served_sums

FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.25  # between two questions after what was staged


class VllmUpdater(ServerUpdater):
    """The version that a vLLM server serves, its change, and its audit."""

    def __init__(self, engine: Updated, routes: ServerRoutes, audit_every: int) -> None:
        super().__init__(engine)
        self._routes, self._audit_every = routes, audit_every
        self._sums = dict[str, int]()  # of the tensors that were loaded last
        self._updates = 0

    async def audit(self) -> None:
        """Read back what is served. Raises PolicyMismatch, and ends the server, if it is not what was published."""
        await self._paused(self._audit)

    async def _stage(self, update: WeightUpdate) -> dict[str, int]:
        """Let every rank receive and verify an update; returns the sums of its tensors."""
        ranks, look = await self._routes.stage(as_text(update)), FIRST_LOOK_S
        async with asyncio.timeout(LONG_S):
            while any(rank["state"] == "receiving" for rank in ranks):
                await asyncio.sleep(look)
                look = min(2 * look, LONGEST_LOOK_S)
                ranks = await self._routes.staged()
        if refused := [rank for rank in ranks if rank["state"] != "staged"]:
            await self._routes.drop()
            lost = all(rank.get("lost") or rank.get("no_base") for rank in refused)
            no_base = lost and any(rank.get("no_base") for rank in refused)  # then other ranks may have waited in vain
            failure = BaseMissing if no_base else TransferFailed if lost else PolicyMismatch
            raise failure(f"engine {self.name} {'lacks' if lost else 'refused'} {refused[0].get('error') or refused[0]}")
        return {name: int(total) for name, total in ranks[0]["sums"].items()}

    async def _load(self, update: WeightUpdate, staged: dict[str, int], label: str) -> None:
        with self._span("commit", step=update.version.step):
            await self._routes.load(as_text(update), label)
        self._sums, self._updates = staged, self._updates + 1
        if self._audit_every and self._updates % self._audit_every == 0:
            await self._audit()

    async def _hold(self, mode: InFlight) -> None:
        await self._routes.hold(mode)

    async def _resume(self) -> None:
        await self._routes.resume()

    async def _audit(self) -> None:
        with self._span("audit", step=self.version.step):
            blocks: Any = await self._routes.served()
        served = served_sums(blocks, self.name)
        if wrong := sorted({*self._sums.items()} ^ {*served.items()}):
            raise PolicyMismatch(
                f"engine {self.name} computes with other weights than were published: {wrong[0][0]} and "
                f"{len({name for name, _ in wrong}) - 1} more tensors differ"
            )
