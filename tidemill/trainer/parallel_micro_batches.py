"""Micro-batches side by side on a CPU: each in a thread of its own, where a trainer was given several.

    parts -> whichever lane is free takes the next one -> gradients added up, a matrix at a time

The threads of one product wait for one another at its end, and for all that one of them does alone in between; micro-batches
do not. Together they hold no more tokens than one would. What they add up comes in the order in which they get there, so the
bits of sums differ from one run to the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import torch

from tidemill.runtime.cpu_sharing import Cores

T = TypeVar("T")

LEAST = 512  # tokens: with fewer, reading weights and adding to their gradients is too much of the work


def lanes_for(threads: int, tokens: int, longest: int) -> int:
    """How many micro-batches run at a time, so many tokens together. longest: of a row, at most."""
    return max(1, min(threads, tokens // max(LEAST, longest)))


class Lanes:
    def __init__(self, threads: int = 1, cores: Cores | None = None) -> None:
        """threads: that may have a micro-batch of their own; with one, all cores compute the same one. cores: those of this
        process, which may lend them to others."""
        self.threads, self.cores = threads, cores or Cores()
        self._several, self._given = False, 0
        self._todo: Sized = ()

    @property
    def begun(self) -> int:
        """Micro-batches so far, for whoever asks whether it moves."""
        return self._given - len(self._todo)

    def each(self, run: Callable[[T], None], parts: Sequence[T], lanes: int = 1) -> None:
        """Run all of them, begun in this order, so many at a time. What one raises is raised when nothing runs any more; no
        other is begun in between."""
        todo = deque(parts)
        self._given, self._todo = self.begun + len(todo), todo
        lanes = min(lanes, len(parts))
        if lanes > 1:
            self._side_by_side(run, todo, lanes)
        else:
            while todo:
                run(todo.popleft())

    def take(self) -> None:
        """Before a pass of a micro-batch."""
        if not self._several:
            self.cores.take()

    def _side_by_side(self, run: Callable[[T], None], todo: deque[T], lanes: int) -> None:
        """The caller's thread is the first lane, and opens others while there are cores for them; they close when there are
        none, each after a micro-batch."""
        before, width = torch.get_num_threads(), self.threads // lanes
        others: dict[int, threading.Thread] = {}
        failed: list[BaseException] = []

        def lane(number: int) -> None:
            torch.set_num_threads(width)  # of this thread
            try:
                while todo and not failed and number < (now := self._now(width, lanes)):
                    for other in range(1, now) if number == 0 else ():
                        if other not in others or not others[other].is_alive():
                            others[other] = threading.Thread(target=lane, args=(other,), name=f"lane-{other}")
                            others[other].start()
                    try:
                        part = todo.popleft()
                    except IndexError:  # another one took the last
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
        share = self.cores.share()
        return lanes if share is None else max(1, min(lanes, share // width))
