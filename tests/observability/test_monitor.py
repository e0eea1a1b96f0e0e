"""What the monitor asks of the processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill import monitor
from tidemill.monitor import Monitor
from tidemill.protocols import PeerLost
from tidemill.types import Telemetry


class Engine:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def telemetry(self) -> Telemetry:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


async def test_an_engine_that_is_lost_or_silent_holds_nobody_up_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "ENGINE_S", 0.01)
    well = Telemetry("engine-0", 1, [], {})
    answers = [well, PeerLost("gone"), TimeoutError("silent"), None]
    assert [await Monitor._of(Engine(answer)) for answer in answers] == [well, None, None, None]
    with pytest.raises(ValueError):
        await Monitor._of(Engine(ValueError("a defect")))
