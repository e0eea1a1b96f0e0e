"""CPU sharing between processes that want more threads than there are cores.

    board: one number per process, the threads it would use now; 0 while it computes nothing

The board is shared memory. Before each piece of work (an engine's step, a trainer's micro-batch) a process writes how many
threads it wants, reads what the others want, and takes its share: everything it wants while there are cores for all,
otherwise a proportional part, but at least one thread. A process that computes alone has the whole machine. Processes that
compute together use as many threads as there are cores, or one each: the threads of one process wait for one another at
every matrix product, so three threads on two cores would all be slow.

Nobody waits and nobody is notified. An outdated number costs a core for one piece of work; the number of a dead process
stays until a successor takes its seat. Background work, such as staging weights and writing checkpoints, is not counted.
Sharing changes the number of threads, and so the order in which sums are added.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.core.config import Config
from tidemill.core.hardware import usable_cores
from tidemill.core.shared_memory_file import anonymous_memory

MOST = 0xFFFF  # the largest number of threads a board can hold
_ITEM = 2  # bytes per number


class Seat(Config):
    """A process's place on a board, as plain data. A new holder clears what a dead one left there."""

    board: str
    place: int
    wanted: int
    cores: int


class Cores:
    """The cores of a process that shares them with nobody: it uses all threads it was given."""

    def share(self) -> int | None:
        """The number of threads to compute with from now on; None for all that were given."""
        return None

    def take(self) -> None:
        """Take this process's share; call before a piece of work, in the thread that computes it."""

    def leave(self) -> None:
        """Give the cores up: there is nothing to compute for now."""


class SharedCores(Cores):
    """The cores of a process that shares them with others by a board (see the module)."""

    def __init__(self, seat: Seat, use: Callable[[int], None]) -> None:
        """use: called with the new number of threads whenever it changes, in the thread that calls `take`."""
        fd = os.open(seat.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("H")
        finally:
            os.close(fd)
        self._seat, self._use, self._used = seat, use, 0
        self.leave()  # clears what a dead holder left there

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
    """Seats at a new board for the processes named in `wanted`, valid while the context is open.

    wanted: threads by process name. The result is empty where there is a core for each thread, where every process has
    one thread only, and where processes cannot share memory.
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
