"""Runs long work in small turns between an engine's steps.

It needs no thread, so nothing competes with the threads that compute a step, neither for cores nor for the interpreter. The
engine's loop and `in_turns` each come once in a round of the event loop. Without steps, turn follows turn, and calls and
heartbeats are answered between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tidemill.models.piecewise import Work

T = TypeVar("T")

TURN_S = 0.0025  # half of the 5 ms by which a step may be delayed; the rest is for the last piece and for cold caches
SHARE = 1 / 20  # of the time since the last turn: even with slow steps the work ends in 20 times its own time


async def in_turns(work: Work[T], note: Callable[[float, float], None], check: Callable[[], None]) -> T:
    """Do `work` in turns. It is given up when this is cancelled or `check` raises before a turn.

    note: called with the beginning and the end of each turn, by the monotonic clock.
    """
    ended = time.monotonic()
    try:
        while True:
            await asyncio.sleep(0)  # first, because earlier work in this round, such as a commit, delays the step too
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
