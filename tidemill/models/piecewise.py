"""Long work on weights, in pieces: whoever has it done may do something else between two of them."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
Work: TypeAlias = Generator[None, None, T]  # each step of it is a piece; what it returns is the result

PIECE_BYTES = 1 << 21  # to copy, to sum up or to pack them takes 0.1 to 0.4 ms
DEVICE_PIECE_BYTES = 8 << 20  # steps that run beside them wait for large ones: see `docs/performance.md`, "On a CUDA device"
ROWS = 32  # a piece has a multiple: packed matrices are made of so many, and four rows of anything are whole words


def at_once(work: Work[T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def by_rows(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Tensors of equal shape, or length, cut alike, so that the first one's pieces have some `PIECE_BYTES`, or more of them
    where they lie on a device."""
    size = PIECE_BYTES if first.is_cpu else DEVICE_PIECE_BYTES
    if first.nbytes <= size:
        return ((first, *others),)
    rows = max(ROWS, size * len(first) // first.nbytes // ROWS * ROWS)
    return zip(*(tensor.split(rows) for tensor in (first, *others)), strict=True)
