"""A run that goes on by itself after the loss of its trainer, unless it was stopped at that very instant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.controller.engine_supervisor import Budget
from tidemill.core.config import build
from tidemill.core.errors import PeerDied
from tidemill.run import session
from tidemill.run.recipe import RunConfig


def losing(monkeypatch: pytest.MonkeyPatch, told: list[str], work: Callable[[], Awaitable[str]]) -> Awaitable[Any]:
    """A run whose training is `work`, and that begins and ends nothing else."""

    class Losing(session.Session):
        def open(self) -> None:
            self.ledger, self._budget = SimpleNamespace(event=lambda kind, detail: told.append(kind)), Budget(3, 60.0, 0.0)

        async def prepare(self) -> None: ...
        async def start(self) -> None: ...

        async def train(self) -> None:
            self.result = await work()

        async def finish(self) -> Any:
            return self.result

    monkeypatch.setattr(session, "Session", Losing)
    config = build(RunConfig, {"env": "guess", "model": "m", "run_dir": "r", "supervise": {"resume": True}})
    display: Any = SimpleNamespace(note=told.append, close=lambda: told.append("closed"))
    return session.run(config, display)


async def test_the_work_begins_again_after_a_loss(monkeypatch: pytest.MonkeyPatch):
    told, ends = [], [PeerDied("trainer", "killed by SIGKILL"), None]

    async def work() -> str:
        if (end := ends.pop(0)) is not None:
            raise end
        return "done"

    assert await losing(monkeypatch, told, work) == "done"
    assert told[0] == "run_resumed" and "going on by itself" in told[1] and told[2:] == ["closed"]


async def test_a_stop_that_a_loss_swallowed_still_stops(monkeypatch: pytest.MonkeyPatch):
    told, waiting = [], asyncio.Event()

    async def work() -> str:
        if waiting.is_set():
            return "begun again"
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as a task group does, one of whose tasks failed at that instant
            raise PeerDied("trainer", "killed by SIGKILL") from None
        return "not reached"

    run = asyncio.ensure_future(losing(monkeypatch, told, work))
    await waiting.wait()
    run.cancel()
    done, _ = await asyncio.wait({run}, timeout=5.0)
    assert done and told == ["closed"]
    with pytest.raises(PeerDied):
        run.result()
