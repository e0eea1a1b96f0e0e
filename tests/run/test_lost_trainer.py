"""A run that goes on by itself after the loss of its trainer, unless it was stopped at that very instant."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tidemill.controller.engine_supervisor import Budget
from tidemill.core.errors import PeerDied
from tidemill.run.session import _despite_losses


def session(told: list[str]):
    """As much of one as the loss of a trainer concerns."""
    return SimpleNamespace(
        config=SimpleNamespace(supervise=SimpleNamespace(resume=True)),
        ledger=SimpleNamespace(event=lambda kind, detail: told.append(kind)),
        note=told.append,
    )


async def test_the_work_begins_again_after_a_loss():
    told, ends = [], [PeerDied("trainer", "killed by SIGKILL"), None]

    async def work() -> str:
        if (end := ends.pop(0)) is not None:
            raise end
        return "done"

    assert await _despite_losses(session(told), Budget(3, 60.0, 0.0), work) == "done"
    assert told[0] == "run_resumed" and "going on by itself" in told[1]


async def test_a_stop_that_a_loss_swallowed_still_stops():
    told, waiting = [], asyncio.Event()

    async def work() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as a task group does, one of whose tasks failed at that instant
            raise PeerDied("trainer", "killed by SIGKILL") from None

    run = asyncio.create_task(_despite_losses(session(told), Budget(3, 60.0, 0.0), work))
    await waiting.wait()
    run.cancel()
    done, _ = await asyncio.wait({run}, timeout=5.0)
    assert done and told == []
    with pytest.raises(PeerDied):
        run.result()
