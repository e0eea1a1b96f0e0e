"""Admission of requests to a server: so many at a time, and none while its weights change.

What waits, waits here and not in the server. So a request is sent with the salt of the version that is served, and
`abort` knows which requests have begun.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """`await enter()`, and `leave()` at the end. `shut` lets nobody enter until `open`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._inside, self._shut = limit, 0, False
        self._queue: deque[asyncio.Future[bool]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        return sum(not each.done() for each in self._queue)

    @property
    def inside(self) -> int:
        return self._inside

    def request(self) -> asyncio.Future[bool]:
        """A place in the queue. Its result is True when the request may be sent, and False if it was called off before."""
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._let_in()
        return place

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()
        self._let_in()

    async def emptied(self, deadline_s: float) -> None:
        """Wait until nothing is inside. Raises TimeoutError at the deadline."""
        async with asyncio.timeout(deadline_s):
            await self._empty.wait()

    def shut(self) -> None:
        self._shut = True

    def open(self) -> None:
        self._shut = False
        self._let_in()

    def fail(self, error: Exception) -> None:
        """Raise `error` from everything that waits."""
        while self._queue:
            if not (place := self._queue.popleft()).done():
                place.set_exception(error)

    def _let_in(self) -> None:
        while self._queue and not self._shut and self._inside < self._limit:
            if not (place := self._queue.popleft()).done():
                place.set_result(True)
                self._inside += 1
                self._empty.clear()
