"""A client's connection with deadlines: for the head of its request, and for taking what it is sent.

uvicorn waits for ever for both, so whoever can reach the port could hold connections, and what is computed for them, without
sending a key. The body's deadline is the application's (`app.BODY_S`), which can still answer. A client that is late is
disconnected; its request ends as that of a client that left.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # from the first wait for a request's head to its last byte
TAKE_S = 60.0  # for a full buffer (64 KiB) to drain


class BoundedConnection(H11Protocol):
    _head: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = _cancelled(self._head)
        elif self._head is None:  # more bytes do not put it off
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if (
            self.cycle is not None
        ):  # the body of a request turned out to be none: what the application says of it goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking = _cancelled(self._taking)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._taking = _cancelled(self._head), _cancelled(self._taking)
        super().connection_lost(exc)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
