"""Updates of a server's weights: stage beside the decoding, then pause, load, look and resume.

    stage -> verify -> [ pause -> load -> resume ]

A refusal comes from the stage, before anything is paused: the server goes on with what it serves. Between pause and resume
nothing is sampled. If that part fails, the server may hold any mixture of weights: it is ended, never resumed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tidemill.core import fault_injection
from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.types import InFlight, Version
from tidemill.core.weight_update import UpdateSupport, WeightUpdate
from tidemill.engine.remote.admission import Admission
from tidemill.engine.request_refusals import check_forward


@dataclass(frozen=True, slots=True)
class Updated:
    """The engine that an updater belongs to, as far as it needs it."""

    name: str
    version: Version  # that the engine begins with
    takes: UpdateSupport
    admission: Admission
    in_flight: InFlight
    span: Callable[..., AbstractContextManager[None]]  # records a phase's time
    fail: Callable[[Exception], None]  # ends the server, and everything that is asked of it


class ServerUpdater(ABC):
    """The version that a server serves, and its change. A subclass knows the server's routes."""

    def __init__(self, engine: Updated) -> None:
        self.version, self.takes, self.name = engine.version, engine.takes, engine.name
        self.labels = dict[str, Version]()  # every version served, by the name that the server gives its weights
        self._engine, self._span = engine, engine.span
        self._one_at_a_time = asyncio.Lock()  # bounded: held for an update or an audit, whose calls have deadlines

    @abstractmethod
    async def _stage(self, update: WeightUpdate) -> Any:
        """Receive and verify an update; returns what `_load` needs. What is served stays as it is."""

    @abstractmethod
    async def _load(self, update: WeightUpdate, staged: Any, label: str) -> None:
        """Have the paused server load what was staged, call it `label`, and look at what it serves."""

    @abstractmethod
    async def _hold(self, mode: InFlight) -> None:
        """Pause the server, so that requests in flight meet the next version as `mode` says."""

    @abstractmethod
    async def _resume(self) -> None: ...

    async def update(self, update: WeightUpdate) -> Version:
        """Stage, verify and load a version."""
        async with self._one_at_a_time:
            self.takes.check(update, f"engine {self.name}", self.version)
            check_forward(update.version, self.version, self.name)
            with self._span("stage", step=update.version.step, bytes=update.bytes):
                fault_injection.reach(self.name, "stage", update.version.step)
                staged = await self._stage(update)
            commit = asyncio.ensure_future(self._commit(update, staged))
            try:
                await asyncio.shield(commit)  # bounded: by the deadlines of its calls
            except asyncio.CancelledError:
                await asyncio.wait({commit})  # bounded: as above. It has begun, so it goes to its end
                commit.result()
                raise
            return self.version

    async def _commit(self, update: WeightUpdate, staged: Any) -> None:
        async def load() -> None:
            fault_injection.reach(self.name, "commit", update.version.step)
            label = label_of(update.version)
            await self._load(update, staged, label)
            self.labels[label] = self.version = update.version

        await self._between(load)

    async def _paused(self, act: Callable[[], Awaitable[None]]) -> None:
        """`_between`, once no update is under way."""
        async with self._one_at_a_time:
            await self._between(act)

    async def _between(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do `act` while nothing is sampled. If anything fails here, the server is ended."""
        self._engine.admission.shut()
        try:
            await self._hold(self._engine.in_flight)
            await act()
            await self._resume()
        except BaseException as error:
            failed = EngineFailed(f"engine {self.name} failed in an update of its weights: {error}")
            self._engine.fail(error if isinstance(error, PolicyMismatch) else failed)
            if isinstance(error, (PolicyMismatch, EngineFailed, asyncio.CancelledError)):
                raise
            raise failed from error
        self._engine.admission.open()


def label_of(version: Version) -> str:
    """The name that a server gives the weights of a version."""
    return str(version)
