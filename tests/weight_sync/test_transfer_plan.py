"""Plans of direct transfers: what all senders send to a receiver is what it needs, each element once."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tidemill.weight_sync.manifest import Block
from tidemill.weight_sync.transfer_plan import Needs, Region, pieces_for, within


def cuts(length: int, parts: int, rng: random.Random) -> list[tuple[int, int]]:
    """(begin, end) of so many neighbours that cover a length; some may be empty."""
    edges = [0, *sorted(rng.randint(0, length) for _ in range(parts - 1)), length]
    return list(pairwise(edges))


def held(shape: tuple[int, ...], ranks: int, rng: random.Random) -> list[Block]:
    """The rows of a tensor that each rank of a trainer holds."""
    rows = cuts(shape[0], ranks, rng)
    return [
        Block("w", shape, (begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]), "float32", None)
        for begin, end in rows
    ]


def needed(shape: tuple[int, ...], ranks: int, rng: random.Random) -> list[Needs | None]:
    """What each tensor-parallel rank takes: a column of the last dimension or rows of the first, or everything."""
    dim = rng.choice((0, len(shape) - 1, None))
    if dim is None:
        return [None] * ranks
    found = list[Needs | None]()
    for begin, end in cuts(shape[dim], ranks, rng):
        at, size = [0] * len(shape), [*shape]
        at[dim], size[dim] = begin, end - begin
        whole: Region = tuple(at), tuple(size)
        half = size[0] // 2  # as fused layers do: two regions of one tensor
        first: Region = whole[0], (half, *size[1:])
        second: Region = (at[0] + half, *at[1:]), (size[0] - half, *size[1:])
        found.append({"w": rng.choice(([whole], [first, second], [second, first]))})
    return found


@pytest.mark.parametrize("seed", range(20))
def test_each_element_that_is_needed_travels_once_and_no_other(seed: int) -> None:
    for number in range(10):
        every_element_once(random.Random(10 * seed + number))


def every_element_once(rng: random.Random) -> None:
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    values = np.arange(np.prod(shape)).reshape(shape)
    blocks = held(shape, rng.randint(1, 4), rng)
    for needs in needed(shape, rng.randint(1, 4), rng):
        arrived, wanted = np.zeros(shape, int), np.zeros(shape, int)
        for at, size in [((0,) * len(shape), shape)] if needs is None else needs["w"]:
            wanted[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] += 1
        for block in blocks:
            own = values[tuple(slice(a, a + n) for a, n in zip(block.offset, block.size, strict=True))]
            for piece in pieces_for([block], needs):
                place = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))
                np.testing.assert_array_equal(own[within(piece, block)], values[place])
                arrived[place] += 1
        np.testing.assert_array_equal(arrived, wanted)


def test_what_is_not_needed_does_not_travel_and_another_shape_is_refused() -> None:
    block = Block("w", (4, 2), (0, 0), (4, 2), "float32", None)
    assert pieces_for([block], {"other": [((0, 0), (4, 2))]}) == [] == pieces_for([block], {"w": [((1, 0), (0, 2))]})
    with pytest.raises(ValueError, match="1 dimensions is needed, the tensor has 2"):
        pieces_for([block], {"w": [((0,), (4,))]})
