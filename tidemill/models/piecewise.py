"""Long work on weights, cut into pieces between which the caller may do other work."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
Work: TypeAlias = Generator[None, None, T]  # each `yield` ends a piece; the return value is the result

PIECE_BYTES = 1 << 21  # copying, summing or packing as much takes 0.1 to 0.4 ms
DEVICE_PIECE_BYTES = 8 << 20  # larger ones delay concurrent steps: see `docs/performance.md`, "On a CUDA device"
ROWS = 32  # a piece has a multiple: packed matrices have blocks of 32 rows, and four rows of anything are whole words


def at_once(work: Work[T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def by_rows(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Pieces of equally long tensors, cut at the same rows, by the first one's bytes."""
    size = PIECE_BYTES if first.is_cpu else DEVICE_PIECE_BYTES
    if first.nbytes <= size:
        return ((first, *others),)
    rows = max(ROWS, size * len(first) // first.nbytes // ROWS * ROWS)
    return zip(*(tensor.split(rows) for tensor in (first, *others)), strict=True)
