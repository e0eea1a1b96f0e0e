"""Process groups of one sender (rank 0) and its receivers, over gloo, which break off together and at a deadline.

    sender: Lobby() listens        both: connected(store, rendezvous, rank, watch) -> Link -> broadcast | send | receive

All meet at the sender's store before the group is made, so that one that never comes is noticed without a group. Whoever
fails marks the store, and lets its group go, which closes its connections; the others see one or the other. A link that
broke is never used again.

Store and group listen on loopback only. PyTorch's store knows no password: any user of this machine may connect to it, and
could disturb a transfer, or read the addresses at which the ranks of a group listen and take a rank's place there. Keys
begin with a secret, which only the update names. What is received is checked against the version's fingerprint all the same.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from tidemill.core.errors import TransferFailed
from tidemill.core.weight_update import Rendezvous

HOST = "127.0.0.1"
CONNECT_S = 20.0  # for a connection between processes that have all come
POLL_S, LOOK_S = 0.002, 0.05  # between two looks: at who has come, and at the mark of a failure
_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Watch:
    """The deadline of one transfer, and the event that ends it early."""

    until: float  # by the monotonic clock
    stop: threading.Event

    @classmethod
    def over(cls, rendezvous: Rendezvous, stop: threading.Event) -> Watch:
        return cls(time.monotonic() + rendezvous.limit_s, stop)

    def left(self, most: float = inf) -> timedelta:
        """The time left, `most` at most. Raises TransferFailed when there is none."""
        if self.stop.is_set():
            raise TransferFailed("the transfer was ended from here")
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise TransferFailed("the transfer did not end within its limit of time")
        return timedelta(seconds=min(seconds, most))


class Lobby:
    """The sender's store, at which receivers meet it. It listens on a port of its own on loopback."""

    def __init__(self) -> None:
        listening = socket.socket()
        listening.bind((HOST, 0))
        listening.listen(64)
        port = listening.getsockname()[1]
        self.store: Store = TCPStore(
            *(HOST, port, None, True, timedelta(seconds=CONNECT_S)),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self.location = f"tcp://{HOST}:{port}/{secrets.token_hex(16)}"


def store_at(location: str, watch: Watch) -> Store:
    """The store of the sender that named this location. Raises TransferFailed when nothing listens there."""
    address = location.removeprefix("tcp://").partition("/")[0]
    host, _, port = address.rpartition(":")
    if not (location.startswith("tcp://") and host == HOST and port.isdecimal()):
        raise ValueError(f"{location[:80]!r}: expected tcp://{HOST}:PORT/SECRET, where a sender on this machine listens")
    try:
        return TCPStore(host, int(port), None, False, watch.left(CONNECT_S), wait_for_workers=False)
    except RuntimeError as error:
        raise TransferFailed(f"no sender listens at {address}: {_first_line(error)}") from None


class Link:
    """One process's end of a group. `broken` says why it can be used no more."""

    def __init__(self, store: Store, group: ProcessGroupGloo, size: int) -> None:
        self._store, self._group, self.size = store, group, size
        self._under_way: Any = None  # the operation that was begun last, if it may not have ended
        self.broken = ""

    def broadcast(self, tensor: Tensor, watch: Watch) -> None:
        """Send a tensor to all receivers, or receive it. One that fails may be written to later, as long as the limit."""
        options = BroadcastOptions()
        options.rootRank = 0
        self._do("broadcast", ([tensor], options), watch, looks=True)

    def send(self, tensor: Tensor, rank: int, watch: Watch) -> None:
        self._do("send", ([tensor], rank, 0), watch)

    def receive(self, tensor: Tensor, rank: int, watch: Watch) -> None:
        """Receive a tensor in place. Once this has failed, nothing writes to it any more."""
        self._do("recv", ([tensor], rank, 0), watch)

    def _do(self, name: str, given: tuple[Any, ...], watch: Watch, looks: bool = False) -> None:
        """Do one operation. looks: look for a failure meanwhile; a wait that is cut off closes a connection of two."""
        if self.broken:
            raise TransferFailed(f"the process group is used no more: {self.broken}")
        try:
            self._under_way = getattr(self._group, name)(*given)
            while True:
                try:
                    self._under_way.wait(watch.left(LOOK_S if looks else inf))
                except RuntimeError:
                    if not looks:
                        raise
                    if not self._under_way.is_completed():
                        self._look()
                        continue
                    self._under_way.wait(timedelta(seconds=LOOK_S))  # it has ended meanwhile: returns, or raises why
                self._under_way = None
                return
        except (RuntimeError, TransferFailed) as error:
            if not looks or isinstance(error, RuntimeError):
                self._under_way = None
            raise self.abort(_first_line(error)) from None

    def _look(self) -> None:
        try:
            failed = self._store.check([_FAILED])
        except RuntimeError:
            raise TransferFailed("the sender is gone") from None
        if failed:
            raise TransferFailed("another process of the group failed")

    def abort(self, why: str) -> TransferFailed:
        """Break the group off on all sides. Returns the error to raise here."""
        if not self.broken:
            self.broken = why or "it was ended"
            _mark(self._store, self.broken)
            if self._under_way is not None:  # the end of a group would wait for it
                hold(self._group, [self._under_way])
            del self._group
            self._under_way = None
        return TransferFailed(f"the transfer of weights broke off: {self.broken}")


def connected(store: Store, location: str, rendezvous: Rendezvous, rank: int, watch: Watch) -> Link:
    """Meet the others of a rendezvous at `location`, as rank 0 or a receiver. Raises TransferFailed."""
    secret, size = location.rpartition("/")[2], rendezvous.receivers + 1
    own = PrefixStore(f"{secret}/{rendezvous.group}", store)
    here = [f"here-{each}" for each in range(size)]
    try:
        own.set(here[rank], "")
        while not (whole := own.check(here)) or own.check([_FAILED]):
            watch.left()
            if whole or own.check([_FAILED]):
                raise TransferFailed("another process of the group failed")
            watch.stop.wait(POLL_S)
        group = ProcessGroupGloo(PrefixStore("group", own), rank, size, gloo_options(HOST, watch.left(CONNECT_S)))
        group._set_default_timeout(timedelta(seconds=rendezvous.limit_s))
        return Link(own, group, size)
    except (RuntimeError, TransferFailed) as error:
        _mark(own, str(error))
        raise TransferFailed(f"not all came to the transfer of weights: {_first_line(error)}") from None


def gloo_options(host: str, limit: timedelta) -> Any:
    """Options of a group whose connections are made at this address, each within the limit."""
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices, options._threads = [ProcessGroupGloo.create_device(hostname=host)], 1
    options._timeout = limit
    return options


def hold(group: ProcessGroupGloo, works: Sequence[Any]) -> None:
    """Keep a group that is used no more until its operations have ended, because its own end would wait for them."""
    threading.Thread(target=_hold, args=(group, works), daemon=True).start()


def _hold(group: ProcessGroupGloo, works: Sequence[Any]) -> None:
    never = threading.Event()
    while not all(work.is_completed() for work in works):
        never.wait(1.0)


def _mark(store: Store, why: str) -> None:
    with suppress(RuntimeError):  # the sender, whose store it is, is gone
        store.set(_FAILED, why[:200])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
