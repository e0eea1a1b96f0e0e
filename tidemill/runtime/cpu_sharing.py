"""CPU sharing between processes that want more threads than there are cores.

A board in shared memory holds the threads that each process would use now, 0 while it computes nothing. Before each piece of
work (an engine's step, a trainer's micro-batch) a process writes how many it wants, reads what the others want, and takes
its share: everything while there are cores for all, otherwise a proportional part, but at least one thread. More threads
than cores would all be slow, because those of one process wait for one another at every matrix product.

Nobody waits and nobody is notified. An outdated number costs a core for one piece of work; the number of a dead process
stays until a successor of its name takes its place. Sharing changes the number of threads, and so the order of sums.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.core.config import Config
from tidemill.core.hardware import usable_cores
from tidemill.core.memory import anonymous_memory

MOST = 0xFFFF  # the largest number of threads a board can hold
PLACES = 128  # on a board: for the processes of a run, and for those that join it
_ITEM = 2  # bytes per number


class CoreShare(Config):
    """A process's share of the cores: its place on a board, as plain data.

    A new holder clears what a dead one left there.
    """

    board: str
    place: int
    wanted: int
    cores: int


class Cores:
    """The cores of a process that shares them with nobody: it uses all threads it was given."""

    def share(self) -> int | None:
        """The number of threads to compute with from now on; None for all that were given."""

    def take(self) -> None:
        """Take this process's share; call before a piece of work, in the thread that computes it."""

    def leave(self) -> None:
        """Give the cores up: there is nothing to compute for now."""


class SharedCores(Cores):
    """The cores of a process that shares them with others by a board (see the module)."""

    def __init__(self, share: CoreShare, use: Callable[[int], None]) -> None:
        """use: called with the new number of threads whenever it changes, in the thread that calls `take`."""
        fd = os.open(share.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("H")
        finally:
            os.close(fd)
        self._place, self._use, self._used = share, use, 0
        self.leave()  # clears what a dead holder left there

    def share(self) -> int:
        mine = self._place
        self._board[mine.place] = mine.wanted
        return max(1, min(mine.wanted, mine.wanted * mine.cores // sum(self._board)))

    def take(self) -> None:
        share = self.share()
        if share != self._used:
            self._used = share
            self._use(share)

    def leave(self) -> None:
        self._board[self._place.place] = 0


class CoreBoard:
    """The core shares of a run's processes, also of those that join later."""

    def __init__(self, path: str | None) -> None:
        """path: the board's shared memory; None where nothing is shared."""
        self._path, self._cores, self._places = path, usable_cores(), dict[str, int]()

    def share(self, name: str, threads: int) -> CoreShare | None:
        """The share of a process that wants `threads`. Its cores are its own (None) if no place is left.

        A name keeps its place, so that who is started again takes over from who died.
        """
        if self._path is None or (place := self._places.setdefault(name, len(self._places))) >= PLACES:
            return None
        return CoreShare(board=self._path, place=place, wanted=threads, cores=self._cores)


@contextmanager
def core_board(threads: int) -> Iterator[CoreBoard]:
    """A new board, valid while the context is open. threads: the most that one process may want.

    Nothing is shared where every process has one thread only, and where processes cannot share memory.
    """
    made = anonymous_memory("tidemill-cores") if 1 < threads <= MOST else None
    if made is None:
        yield CoreBoard(None)
        return
    fd, path = made
    try:
        os.ftruncate(fd, PLACES * _ITEM)
        yield CoreBoard(path)
    finally:
        os.close(fd)
