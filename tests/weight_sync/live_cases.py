"""Live transports in one process, for tests: senders and receivers in threads, which meet as a run's processes do."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from tidemill.core.errors import TransferFailed
from tidemill.core.types import Version
from tidemill.core.weight_update import AddedTo, Rendezvous, WeightUpdate
from tidemill.models.fingerprint import fingerprint
from tidemill.models.weight_slices import KeepsSent, LiveSender, Slice

LIMIT_S = 60.0


def form(piece: Slice) -> Slice:
    return replace(piece, tensor=piece.tensor.to("meta"))


def offered(senders: Sequence[LiveSender], version: Version, held: Sequence[Sequence[Slice]]) -> WeightUpdate:
    """One update of the parts that each sender holds, announced with what they come to."""
    version = replace(version, fingerprint=fingerprint(piece for part in held for piece in part))
    parts = [
        sender.offer(version, map(form, pieces), lambda pieces=pieces: pieces)
        for sender, pieces in zip(senders, held, strict=True)
    ]
    return WeightUpdate(version, tuple(part for update in parts for part in update.parts))


def meeting(update: WeightUpdate, receivers: int = 1, group: str = "", limit_s: float = LIMIT_S) -> list[WeightUpdate]:
    """The update as each receiver is given it; the senders take any of them."""
    group = group or secrets.token_hex(4)
    return [replace(update, rendezvous=Rendezvous(group, i + 1, receivers, limit_s)) for i in range(receivers)]


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """The results of these calls, or what they raise, from threads that run at the same time. None may hang."""
    found: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            found[i] = works[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a transfer hangs"
    return found


class SendsWhenRead:
    """A live sender with the interface of a stored one: it sends, in a thread, whenever an update is received."""

    made: ClassVar[dict[str, SendsWhenRead]] = {}  # by location

    def __init__(self, sender: LiveSender) -> None:
        self.sender = sender

    def send(self, version: Version, slices: Iterable[Slice], onto: AddedTo | None = None) -> WeightUpdate:
        pieces = list(slices)
        update = self.sender.offer(version, map(form, pieces), lambda: pieces, onto)
        self.made[update.parts[0].location] = self
        return update

    def send_whole(self, version: Version) -> WeightUpdate:
        assert isinstance(self.sender, KeepsSent)
        return self.sender.send_whole(version)

    def close(self) -> None:
        self.sender.close()


def received(update: WeightUpdate, receive: Callable[[WeightUpdate], Iterable[Slice]]) -> Iterator[Slice]:
    """What one receiver receives, while the senders of a live update send."""
    if not update.live:
        yield from receive(update)
        return
    (its,), stop = meeting(update), threading.Event()

    def send(sender: LiveSender) -> None:
        with suppress(TransferFailed):  # the receiver says why
            sender.send_offered(its, stop)

    senders = [SendsWhenRead.made[part.location].sender for part in update.parts if part.location in SendsWhenRead.made]
    threads = [threading.Thread(target=send, args=(each,), daemon=True) for each in senders]
    for thread in threads:
        thread.start()
    try:
        yield from receive(its)
    except BaseException:
        stop.set()  # it may never have met them
        raise
    finally:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a sender hangs"
