"""Table of the requests under way, by sequence and by key: added, found, finished, failed."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.core.types import Completion, Scored
from tidemill.engine.native.request_state import ActiveRequest
from tidemill.engine.native.scheduler import Scheduler, Sequence


class RequestTable:
    """Every request that waits or runs. A request leaves the scheduler and the table together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.under_way: dict[Sequence, ActiveRequest] = {}
        self._scheduler = scheduler
        self._by_key: dict[str, set[ActiveRequest]] = {}

    def of_key(self, key: str) -> list[ActiveRequest]:
        """The requests of one key now."""
        return list(self._by_key.get(key, ()))

    def add(self, request: ActiveRequest) -> None:
        """Submit a request to the scheduler, and give it a future."""
        self._scheduler.submit(request.sequence)
        request.future = asyncio.get_running_loop().create_future()
        self.under_way[request.sequence] = request
        if request.key:
            self._by_key.setdefault(request.key, set()).add(request)

    def forget(self, request: ActiveRequest) -> None:
        """Remove a request from the engine, wherever it stands."""
        if self.under_way.pop(request.sequence, None) is None:
            return
        self._scheduler.release(request.sequence)
        if request.key:
            siblings = self._by_key[request.key]
            siblings.discard(request)
            if not siblings:
                del self._by_key[request.key]

    def finish(self, request: ActiveRequest, result: Completion | Scored) -> None:
        """Remove a request, and give its caller the result."""
        self.forget(request)
        future: Any = request.future
        if not future.done():
            future.set_result(result)
        if request.stream is not None:
            request.stream.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Remove every request, and raise `error` in its caller."""
        for request in list(self.under_way.values()):
            self.forget(request)
            assert request.future is not None
            if not request.future.done():
                request.future.set_exception(error)
            if request.stream is not None:
                request.stream.put_nowait(None)
