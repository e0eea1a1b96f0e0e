"""Parallel micro-batches on a CPU: a trainer with several threads runs one micro-batch in each.

    parts -> a free lane (thread) takes the next part -> gradients are added up, one matrix at a time

Threads that share one matrix product wait for one another at its end, and for the sequential code between two products;
parallel micro-batches do not wait. Together they hold no more tokens than one micro-batch otherwise would. Gradients are
added in the order of arrival, so the bits of sums differ from one run to the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import torch

from tidemill.runtime.cpu_sharing import Cores

T = TypeVar("T")

LEAST = 512  # tokens per micro-batch: with fewer, reading weights and adding gradients dominates


def lanes_for(threads: int, tokens: int, longest: int) -> int:
    """The number of parallel micro-batches: `tokens` together, `longest` in a row."""
    return max(1, min(threads, tokens // max(LEAST, longest)))


class Lanes:
    """Runs parts of a pass in one lane (thread) or several, on the cores of this process."""

    def __init__(self, threads: int = 1, cores: Cores | None = None) -> None:
        """threads: the most parallel micro-batches; with 1, all cores compute one."""
        self.threads, self.cores = threads, cores or Cores()
        self._several, self._given = False, 0
        self._todo: Sized = ()

    @property
    def begun(self) -> int:
        """The number of micro-batches begun so far, a measure of progress."""
        return self._given - len(self._todo)

    def each(self, run: Callable[[T], None], parts: Sequence[T], lanes: int = 1) -> None:
        """Call `run` on all parts, begun in this order, `lanes` at a time.

        After an exception no further part begins; it is raised when the running parts have ended.
        """
        todo = deque(parts)
        self._given, self._todo = self.begun + len(todo), todo
        lanes = min(lanes, len(parts))
        if lanes > 1:
            self._side_by_side(run, todo, lanes)
        else:
            while todo:
                run(todo.popleft())

    def take(self) -> None:
        """Take the process's cores before a pass, unless micro-batches run in parallel."""
        if not self._several:
            self.cores.take()

    def _side_by_side(self, run: Callable[[T], None], todo: deque[T], lanes: int) -> None:
        """Run the parts; the first lane, the caller's, opens others while cores are free."""
        before, width = torch.get_num_threads(), self.threads // lanes
        others: dict[int, threading.Thread] = {}
        failed: list[BaseException] = []

        def lane(number: int) -> None:
            torch.set_num_threads(width)  # applies to this thread
            try:
                while todo and not failed and number < (now := self._now(width, lanes)):
                    for other in range(1, now) if number == 0 else ():
                        if other not in others or not others[other].is_alive():
                            others[other] = threading.Thread(target=lane, args=(other,), name=f"lane-{other}")
                            others[other].start()
                    try:
                        part = todo.popleft()
                    except IndexError:  # another lane took the last part
                        return
                    run(part)
            except BaseException as error:
                failed.append(error)

        self._several = True
        try:
            lane(0)
        finally:
            for other in others.values():
                other.join()  # bounded: by its micro-batch; the caller has a deadline for the call
            self._several = False
            torch.set_num_threads(before)
        if failed:
            raise failed[0]

    def _now(self, width: int, lanes: int) -> int:
        share = self.cores.share()  # a lane without a core closes after its micro-batch
        return lanes if share is None else max(1, min(lanes, share // width))
