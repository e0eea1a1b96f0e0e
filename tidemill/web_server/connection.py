"""Client connections: a deadline in every state, and room for new ones at the limit.

    HEAD: waiting for a request, or for the rest of its head          REST: answered before its body came to an end
    TAKE: something was sent that the client has not taken yet        otherwise the application answers, within its limits

uvicorn waits for ever in the first three, so any client that reaches the port could hold connections, and work that is done
for them, without a key. The body's deadline is the application's (`exchange.BODY_S`), which can still answer. A client that
is late is disconnected; its request ends like that of a client that left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # from the first wait for a request's head to its last byte: more than clients keep what is idle, often 5 s
REST_S = 5.0  # for what is left of a body after its request was refused
TAKE_S = 60.0  # for TAKEN bytes to be taken, or all that there are
TAKEN = 1 << 16
YOUNG_S = 1.0  # a connection is never closed earlier to make room
BEYOND = 64  # connections above the limit that get an answer; more are just closed


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines."""

    _deadline: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None
    _state: type | None = None  # IDLE: HEAD, SEND_BODY: REST, None: the application answers
    since = 0.0  # the loop's time at which this state began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that the buffer holds what the client has not taken
        self._watch()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            make_room(self, self.connections, self.limit_concurrency)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if (
            self.cycle is not None
        ):  # the body of a request turned out to be none: what the application says of it goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    @property
    def answering(self) -> bool:
        """True when the application has the whole request."""
        return self._state is None and self.conn.their_state is not h11.SEND_BODY

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(TAKE_S, self._look, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking = _cancelled(self._taking)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline, self._taking = _cancelled(self._deadline), _cancelled(self._taking)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin the deadline of the connection's present state. More bytes do not extend it."""
        theirs = self.conn.their_state
        if self.cycle is None or self.cycle.response_complete:
            state = h11.IDLE if theirs is h11.IDLE else h11.SEND_BODY
        else:
            state = None
        if state is self._state and (state is None or self._deadline is not None):
            return
        self._state, self.since = state, self.loop.time()
        self._deadline = _cancelled(self._deadline)
        if state is not None:
            self._deadline = self.loop.call_later(HEAD_S if state is h11.IDLE else REST_S, self.leave)

    def leave(self) -> None:
        """Close the connection. Data that the client has not taken yet keeps its own deadline."""
        if self._taking is None:
            self.transport.abort()
        else:
            self.transport.close()

    def _look(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if before - left < TAKEN:
            self.transport.abort()
        else:
            self._taking = self.loop.call_later(TAKE_S, self._look, left)


def make_room(new: BoundedConnection, connections: set[Any], limit: int) -> None:
    """Close the connection that has waited longest, of the address that has the most.

    Connections that are being answered stay. If there are no others, the new one gets status 503.
    """
    now, of_address = new.loop.time(), Counter(_address(each) for each in connections)
    waiting = [each for each in connections if not each.answering and now - each.since >= YOUNG_S]
    if waiting:
        gone = max(waiting, key=lambda each: (of_address[_address(each)], now - each.since))
    elif len(connections) >= limit + BEYOND:
        gone = new
    else:
        return
    gone.transport.abort()
    connections.discard(gone)  # now, because others may come before its end is reported


def _address(connection: BoundedConnection) -> str | None:
    return connection.client[0] if connection.client else None


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
