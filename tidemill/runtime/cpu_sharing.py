"""The cores of one machine, shared by processes that would compute with more threads than there are cores.

    board: for each process, with how many threads it would compute now; 0 while it computes nothing

Before each piece of its work, an engine's step or a trainer's micro-batch, a process writes down what it wants, reads what
the others want, and takes its share: all of it while there are cores for everybody, else a part in proportion, one at least.
So whoever computes alone has the machine, and those who compute together have as many threads as cores, or one each: threads
of one process wait for one another at every product, and where three share two cores, all three do. Nobody waits, and nobody
is told: a number that is out of date costs a core for as long as a piece of work takes; that of a process that died, until
another one takes its place. What goes on beside the work, such as staging weights and writing checkpoints, is not counted.
It changes the order in which sums are added up.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.core.config import Config
from tidemill.core.hardware import usable_cores
from tidemill.core.shared_memory_file import anonymous_memory

MOST = 0xFFFF  # threads that a board can tell of
_ITEM = 2  # bytes of its numbers


class Seat(Config):
    """A process's place at a board, as plain data. Whoever takes it after another has ended wipes what that left."""

    board: str
    place: int
    wanted: int
    cores: int


class Cores:
    """Those of a process that shares them with none: it computes with as many threads as it was given."""

    def share(self) -> int | None:
        """With how many threads this process computes from now on; None: with all that it was given."""
        return None

    def take(self) -> None:
        """Before a piece of work, in the thread that computes it."""

    def leave(self) -> None:
        """There is nothing to compute, until further notice."""


class SharedCores(Cores):
    def __init__(self, seat: Seat, use: Callable[[int], None]) -> None:
        """use: is told with how many threads to compute from now on, in the thread that takes them."""
        fd = os.open(seat.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("H")
        finally:
            os.close(fd)
        self._seat, self._use, self._used = seat, use, 0
        self.leave()  # what another one left there when it died

    def share(self) -> int:
        seat = self._seat
        self._board[seat.place] = seat.wanted
        return max(1, min(seat.wanted, seat.wanted * seat.cores // sum(self._board)))

    def take(self) -> None:
        share = self.share()
        if share != self._used:
            self._used = share
            self._use(share)

    def leave(self) -> None:
        self._board[self._seat.place] = 0


@contextmanager
def seats(wanted: dict[str, int]) -> Iterator[dict[str, Seat]]:
    """Places at a board of this process's, for processes by name with so many threads each, while the context is open.

    None for anybody where there is a core for each thread, where nobody has threads to do without, and where processes
    can share no memory.
    """
    cores, made = usable_cores(), None
    if sum(wanted.values()) > cores and 1 < max(wanted.values()) <= MOST:
        made = anonymous_memory("tidemill-cores")
    if made is None:
        yield {}
        return
    fd, board = made
    try:
        os.ftruncate(fd, len(wanted) * _ITEM)
        names = enumerate(wanted.items())
        yield {name: Seat(board=board, place=i, wanted=threads, cores=cores) for i, (name, threads) in names}
    finally:
        os.close(fd)
