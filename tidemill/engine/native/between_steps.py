"""Work that an engine does between its steps, in turns with them: a step, a turn, a step, a turn.

It needs no thread, so nothing competes with the threads that compute a step, neither for cores nor for the interpreter. The
engine's loop and `in_turns` each come once in a round of the event loop; where no step is to be taken, turn follows turn,
and calls and heartbeats are answered between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tidemill.models.piecewise import Work

T = TypeVar("T")

TURN_S = 0.0025  # half of the 5 ms that a step may take longer; the rest is for the last piece, and for what it leaves cold
SHARE = 1 / 20  # of what the others took since the last turn: however slow the steps, the work ends in 20 times its own time


async def in_turns(work: Work[T], note: Callable[[float, float], None], check: Callable[[], None]) -> T:
    """Do `work`, which is given up when this is cancelled or `check` raises before a turn. `note` is told when each turn
    began and ended, by the monotonic clock."""
    ended = time.monotonic()
    try:
        while True:
            await asyncio.sleep(0)  # first: what was done before, another job's last turn or a commit, is a step's delay too
            check()
            begin = time.monotonic()
            until = begin + max(TURN_S, SHARE * (begin - ended))
            try:
                next(work)
                while time.monotonic() < until:
                    next(work)
            except StopIteration as done:
                return done.value
            finally:
                ended = time.monotonic()
                note(begin, ended)
    finally:
        work.close()
