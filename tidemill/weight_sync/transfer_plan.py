"""Plan of a direct transfer: which rows of which block go from a sender to each receiver, in one order for both sides.

    blocks that a sender holds  x  regions that each receiver needs (None: everything)  ->  pieces, a sender's for a receiver

Pure data, without tensors: both sides make it from the same manifest and the same needs, once for each layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.weight_sync.manifest import Block

Region = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in a tensor, and its size
Needs = Mapping[str, Sequence[Region]]  # by tensor: disjoint regions


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one block, which one receiver needs."""

    block: int  # its number in the manifest
    offset: tuple[int, ...]  # in the tensor
    size: tuple[int, ...]


def pieces_for(blocks: Sequence[Block], needs: Needs | None) -> list[Piece]:
    """The pieces of a sender's blocks for one receiver, in the order in which they travel. Empty ones do not travel."""
    found = list[Piece]()
    for number, block in enumerate(blocks):
        regions = [((0,) * len(block.shape), block.shape)] if needs is None else needs.get(block.name, ())
        for region in regions:
            piece = _common(number, block, region)
            if piece is not None and 0 not in piece.size:
                if block.packed is not None:  # a change travels whole, once
                    found.append(Piece(number, block.offset, block.size))
                    break
                found.append(piece)
    return found


def _common(number: int, block: Block, region: Region) -> Piece | None:
    at, size = region
    if not len(at) == len(size) == len(block.shape):
        raise ValueError(f"{block.name}: a region of {len(size)} dimensions is needed, the tensor has {len(block.shape)}")
    begin = tuple(map(max, at, block.offset))
    end = tuple(map(min, map(sum, zip(at, size, strict=True)), map(sum, zip(block.offset, block.size, strict=True))))
    if any(e <= b for b, e in zip(begin, end, strict=True)):
        return None
    return Piece(number, begin, tuple(e - b for b, e in zip(begin, end, strict=True)))


def within(piece: Piece, block: Block) -> tuple[slice, ...]:
    """The index of a piece in its block."""
    return tuple(
        slice(at - origin, at - origin + n) for at, origin, n in zip(piece.offset, block.offset, piece.size, strict=True)
    )
