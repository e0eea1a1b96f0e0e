"""Which task comes when: a fresh permutation each epoch, and a cycle of turns where several environments share a run.

Both are pure functions of the position. Nothing is remembered, so the position in the data is one number, and a resume
goes on exactly there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from tidemill.core.seeding import derive_seed


def task_order(count: int, seed: int, position: int) -> int:
    """The index in 0..count-1 of the task at `position` 0, 1, 2, ... Every epoch of `count` positions holds each once."""
    if count < 1 or position < 0:
        raise ValueError(f"count={count}, position={position}: expected count >= 1 and position >= 0")
    epoch, within = divmod(position, count)
    return _permutation(count, seed, epoch)[within]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    # Sorted by random(), whose sequence Python promises to keep; that of shuffle() it does not.
    draw = random.Random(derive_seed(seed, "order", epoch))
    keys = [draw.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def turns(weights: Sequence[int]) -> list[int]:
    """Whose turn it is at each place of a cycle of sum(weights): number k's comes weights[k] times, evenly spread.

    Its j-th turn is due at (j + 1/2) / weights[k]: Webster's method, of seats in a parliament, as an order. Every whole
    cycle is exact; among K, after n turns k is ahead or behind by at most 1/2 + K/2 * its share.
    """
    if not weights or any(weight < 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights {list(weights)}: expected numbers >= 0, one of them positive")
    due = [((2 * j + 1) / weight, k) for k, weight in enumerate(weights) for j in range(weight)]
    return [k for _, k in sorted(due)]
