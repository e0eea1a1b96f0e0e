"""Updates of a vLLM server's weights: stage beside the decoding, then pause, load, read back and resume.

    stage on every rank -> verify -> [ pause -> load -> audit -> resume ]

A refusal comes from the stage, before anything is paused: the server goes on with what it serves. Between pause and resume
nothing is sampled. If that part fails, the server may hold any mixture of weights: it is ended, never resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from tidemill.core import fault_injection
from tidemill.core.errors import EngineFailed, PolicyMismatch, TransferFailed
from tidemill.core.types import InFlight, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.request_refusals import check_forward
from tidemill.engine.vllm.admission import Admission
from tidemill.engine.vllm.server_routes import LONG_S, ServerRoutes, as_text, label_of, served_sums

FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.25  # between two questions after what was staged


class VllmUpdater:
    """The version that a server serves, and its change."""

    def __init__(
        self,
        routes: ServerRoutes,
        admission: Admission,
        version: Version,
        takes: UpdateSupport,
        *,
        name: str,
        in_flight: InFlight,
        audit_every: int,
        span: Callable[..., AbstractContextManager[None]],
        fail: Callable[[Exception], None],
    ) -> None:
        """Begin with `version`. span: records a phase's time. fail: ends the server, and everything that is asked of it."""
        self.version, self.takes = version, takes
        self.labels = dict[str, Version]()  # every version served, by the name that the server gives its weights
        self._routes, self._admission, self._name, self._fail = routes, admission, name, fail
        self._in_flight, self._audit_every, self._span = in_flight, audit_every, span
        self._sums = dict[str, int]()  # of the tensors that were loaded last
        self._updates = 0
        self._one_at_a_time = asyncio.Lock()  # bounded: held for an update or an audit, whose calls have deadlines

    async def update(self, update: WeightUpdate) -> Version:
        """Stage, verify, load and read back a version."""
        async with self._one_at_a_time:
            self.takes.check(update, f"engine {self._name}", self.version)
            check_forward(update.version, self.version, self._name)
            with self._span("stage", step=update.version.step, bytes=update.bytes):
                sums = await self._stage(update)
            commit = asyncio.ensure_future(self._commit(update, sums))
            try:
                await asyncio.shield(commit)  # bounded: by the deadlines of its calls
            except asyncio.CancelledError:
                await asyncio.wait({commit})  # bounded: as above. It has begun, so it goes to its end
                commit.result()
                raise
            return self.version

    async def audit(self) -> None:
        """Read back what is served. Raises PolicyMismatch, and ends the server, if it is not what was published."""
        async with self._one_at_a_time:
            await self._between(self._audit)

    async def _stage(self, update: WeightUpdate) -> dict[str, int]:
        """Let every rank receive and verify an update; returns the sums of its tensors."""
        fault_injection.reach(self._name, "stage", update.version.step)
        ranks, look = await self._routes.stage(as_text(update)), FIRST_LOOK_S
        async with asyncio.timeout(LONG_S):
            while any(rank["state"] == "receiving" for rank in ranks):
                await asyncio.sleep(look)
                look = min(2 * look, LONGEST_LOOK_S)
                ranks = await self._routes.staged()
        if refused := [rank for rank in ranks if rank["state"] != "staged"]:
            await self._routes.drop()
            lost = all(rank.get("lost") for rank in refused)
            failure = TransferFailed if lost else PolicyMismatch
            raise failure(f"engine {self._name} {'lacks' if lost else 'refused'} {refused[0].get('error') or refused[0]}")
        return {name: int(total) for name, total in ranks[0]["sums"].items()}

    async def _commit(self, update: WeightUpdate, sums: dict[str, int]) -> None:
        async def load() -> None:
            fault_injection.reach(self._name, "commit", update.version.step)
            label = label_of(update.version)
            with self._span("commit", step=update.version.step):
                await self._routes.load(as_text(update), label)
            self._sums, self._updates = sums, self._updates + 1
            if self._audit_every and self._updates % self._audit_every == 0:
                await self._audit()
            self.labels[label] = self.version = update.version

        await self._between(load)

    async def _between(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do `act` while nothing is sampled. If anything fails here, the server is ended."""
        self._admission.shut()
        try:
            await self._routes.hold(self._in_flight)
            await act()
            await self._routes.resume()
        except BaseException as error:
            failed = EngineFailed(f"engine {self._name} failed in an update of its weights: {error}")
            self._fail(error if isinstance(error, PolicyMismatch) else failed)
            if isinstance(error, (PolicyMismatch, EngineFailed, asyncio.CancelledError)):
                raise
            raise failed from error
        self._admission.open()

    async def _audit(self) -> None:
        with self._span("audit", step=self.version.step):
            blocks: Any = await self._routes.served()
        served = served_sums(blocks, self._name)
        if wrong := sorted({*self._sums.items()} ^ {*served.items()}):
            raise PolicyMismatch(
                f"engine {self._name} computes with other weights than were published: {wrong[0][0]} and "
                f"{len({name for name, _ in wrong}) - 1} more tensors differ"
            )
