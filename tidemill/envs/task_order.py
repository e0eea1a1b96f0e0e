"""Task order: a new permutation of tasks each epoch, and a fair cycle over several environments.

Both are pure functions of the position. There is no state, so the position in the data is one number, and a resume
continues exactly there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from tidemill.core.seeding import derive_seed


def task_order(count: int, seed: int, position: int) -> int:
    """Index (0 to count-1) of the task at `position` 0, 1, 2, ...; each epoch has every task once.

    An epoch is `count` positions. Raises ValueError unless count >= 1 and position >= 0.
    """
    if count < 1 or position < 0:
        raise ValueError(f"count={count}, position={position}: expected count >= 1 and position >= 0")
    epoch, within = divmod(position, count)
    return _permutation(count, seed, epoch)[within]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    # Sorted by random(), because Python keeps its sequence between versions, but not that of shuffle().
    draw = random.Random(derive_seed(seed, "order", epoch))
    keys = [draw.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def turns(weights: Sequence[int]) -> list[int]:
    """A cycle of sum(weights) places in which index k comes weights[k] times, evenly spread.

    The j-th turn of k is due at (j + 1/2) / weights[k]: Webster's method for seats in a parliament, used as an order. Every
    whole cycle is exact. Among K indices, after n turns, k is ahead or behind by at most 1/2 + K/2 * its share.
    """
    if not weights or any(weight < 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights {list(weights)}: expected numbers >= 0, one of them positive")
    due = [((2 * j + 1) / weight, k) for k, weight in enumerate(weights) for j in range(weight)]
    return [k for _, k in sorted(due)]
