"""An event loop whose clock jumps to the next timer: hours of a run take milliseconds, and the order is always the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(RuntimeError):
    """Nothing is scheduled and nothing can wake up: a real run would hang here."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
            def select(self, timeout: float | None = None) -> list:
                events = super().select(0)
                if not events:
                    if timeout is None:
                        raise Deadlock("nothing is scheduled and nothing can wake up")
                    loop.now += timeout
                return events

        super().__init__(Jump())

    def time(self) -> float:
        return self.now


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
