"""Which task comes when: a fresh permutation each epoch, as a pure function of the position.

Nothing is remembered, so the position in the data is one number, and a resume goes on exactly there.
"""

from __future__ import annotations

import random
from functools import lru_cache

from tidemill.seeds import derive_seed


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
