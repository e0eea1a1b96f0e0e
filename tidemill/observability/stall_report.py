"""List of this process's open waits, for `tidemill why`.

    with waiting("trainer", "forward_backward", 3600.0):
        ...

Every wait of this process for another one, or for a task that depends on another one, is on the list while it lasts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    peer: str
    what: str  # a method or a condition of the peer
    since: float  # seconds since 1970
    limit_s: float | None  # None: bounded by the waits of those it depends on


_open: dict[int, Wait] = {}
_ids = itertools.count()


@contextmanager
def waiting(peer: str, what: str, limit_s: float | None = None) -> Iterator[None]:
    key = next(_ids)
    _open[key] = Wait(peer, what, time.time(), limit_s)
    try:
        yield
    finally:
        del _open[key]


def open_waits() -> list[Wait]:
    """The open waits of this process, the longest first."""
    return list(_open.values())  # in the order of their beginning
