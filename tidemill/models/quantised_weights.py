"""Matrices in 4 or 8 bits a number, by blocks of 64, as QLoRA holds a frozen base (2305.14314).

    nf4    codes into the 16 quantiles of NormalFloat; a block's largest magnitude is its scale, and scales are quantised
           again: 8 bits each, of their difference from the matrix's mean scale, with a float32 scale for 256 of them
    int8   codes into 255 equal steps from -1 to 1; the scales are float32

Blocks go along the flattened Hugging Face matrix, so that stacking matrices changes no number. A number is its code's
entry times its block's scale, one float32 product: the same bits on every machine. What was dequantised is quantised to
the same numbers again: a matrix that is such entries times such scales already keeps its scales in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from tidemill.models.adapter_config import PROJECTIONS
from tidemill.models.weight_slices import Slice

BLOCK, SCALES = 64, 256  # numbers with one scale, and scales with one scale of their own
PIECE = 1 << 14  # blocks that are quantised at a time
LEAST, MOST = 2.0**-100, 2.0**100  # of a scale: a smaller one is 0, a larger one is refused
BYTES = {"nf4": 1 / 2 + 1 / BLOCK + 4 / (BLOCK * SCALES), "int8": 1 + 4 / BLOCK}  # of a number of a large matrix

NF4 = (  # appendix E of 2305.14314
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
INT8 = tuple(step / 127 for step in range(-127, 128))


def _dynamic() -> tuple[float, ...]:
    """The signed 8-bit map of 2110.02861: a decimal exponent, and a fraction with the bits that it leaves."""
    found = [0.0, 1.0]
    for exponent in range(7):
        steps = 2**exponent
        middles = [0.1 + 0.9 * (2 * step + 1) / (2 * steps) for step in range(steps)]
        found += [sign * 10.0 ** (exponent - 6) * middle for middle in middles for sign in (-1, 1)]
    return tuple(sorted(found))


DYNAMIC = _dynamic()
ENTRIES = {"nf4": NF4, "int8": INT8}


@dataclass(frozen=True)
class Scales:
    """One float32 number for each block: as they are, or in 8 bits each if there are `codes`."""

    numbers: Tensor  # [blocks] float32; with codes [blocks / 256], the scale of each 256 codes
    codes: Tensor | None = None  # [blocks] uint8
    mean: Tensor | None = None  # [] float32, added to what the codes say

    def values(self) -> Tensor:
        """[blocks] float32, none negative."""
        if self.codes is None or self.mean is None:
            return self.numbers
        entries = _table(DYNAMIC, self.codes.device)[self.codes.int()]
        parts = entries * self.numbers.repeat_interleave(SCALES)[: len(entries)]
        found = parts + self.mean
        return torch.where(found < LEAST, 0.0, found.clamp(max=MOST))


@dataclass(frozen=True)
class Quantised:
    """A matrix [N, K] in few bits."""

    kind: str  # nf4, int8
    shape: tuple[int, ...]
    codes: Tensor  # uint8: [numbers] for int8; for nf4 two in each, the first in the high bits
    scales: Scales


def quantise(weight: Tensor, kind: str) -> Quantised:
    """A matrix in few bits, made on its device. kind: "nf4" or "int8".

    Raises ValueError for numbers that are not finite, or beyond 2^100.
    """
    flat = weight.detach().float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    if not bool((scales <= MOST).all()):
        raise ValueError("it has a number that is not finite, or beyond 2^100: such a matrix cannot be quantised")
    scales = torch.where(scales < LEAST, 0.0, scales)
    codes, inverse = torch.empty_like(blocks, dtype=torch.uint8), 1 / torch.where(scales > 0, scales, 1.0)
    for at in range(0, len(blocks), PIECE):
        shares = blocks[at : at + PIECE] * inverse[at : at + PIECE, None]
        codes[at : at + PIECE] = _nearest(shares, NF4) if kind == "nf4" else (shares * 127).round_().add_(127)
    plain = _quantised(weight, kind, codes, Scales(scales))
    if kind == "int8" or torch.equal(dequantise(plain).flatten(), flat):
        return plain
    return _quantised(weight, kind, codes, _narrowed(scales))


def dequantise(given: Quantised) -> Tensor:
    """The matrix [N, K] float32: each code's entry times its block's scale."""
    entries, count = ENTRIES[given.kind], math.prod(given.shape)
    if given.kind == "nf4":
        found = _pairs(given.codes.device).index_select(0, given.codes.int()).view(torch.float32)
    else:
        found = _table(entries, given.codes.device).index_select(0, given.codes.int())
    blocks = found.view(-1, BLOCK).mul_(given.scales.values()[:, None])
    return blocks.flatten()[:count].view(given.shape)


def served_base(slices: Iterable[Slice], kind: str) -> Iterator[Slice]:
    """Slices of a Hugging Face folder, in which the layers' matrices are as a base of this kind has them, in float32.

    Others pass as they are. Raises ValueError for a part of a matrix, whose blocks are not known, and as `quantise` does.
    """
    for piece in slices:
        yield replace(piece, tensor=dequantise(quantised_slice(piece, kind))) if of_base(piece.name) else piece


def quantised_slice(piece: Slice, kind: str) -> Quantised:
    """A whole matrix in few bits. Raises ValueError, with its name, for a part of one, and as `quantise` does."""
    if tuple(piece.tensor.shape) != piece.shape:
        raise ValueError(f"{piece.name}: {list(piece.tensor.shape)} of {list(piece.shape)} came; it is quantised as a whole")
    try:
        return quantise(piece.tensor, kind)
    except ValueError as error:
        raise ValueError(f"{piece.name}: {error}") from None


def of_base(name: str) -> bool:
    """True for the Hugging Face name of a matrix that a quantised base has in few bits."""
    module, _, last = name.rpartition(".")
    return last == "weight" and module.rpartition(".")[2] in PROJECTIONS


def _quantised(weight: Tensor, kind: str, codes: Tensor, scales: Scales) -> Quantised:
    zero = ENTRIES[kind].index(0.0)  # a scale of 0 gives no -0
    codes = codes.masked_fill((scales.values() == 0)[:, None], zero).flatten()
    if kind == "nf4":
        codes = codes[::2] << 4 | codes[1::2]
    return Quantised(kind, tuple(weight.shape), codes, scales)


def _narrowed(scales: Tensor) -> Scales:
    """Scales [blocks] in 8 bits each. The mean is of an exact sum, whose order does not matter."""
    mean = torch.tensor(math.fsum(scales.tolist()) / len(scales), dtype=torch.float32, device=scales.device)
    apart = torch.nn.functional.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    largest = apart.abs().amax(dim=1)
    codes = _nearest(apart / torch.where(largest > 0, largest, 1.0)[:, None], DYNAMIC)
    return Scales(largest, codes.flatten()[: len(scales)].to(torch.uint8), mean)


def _nearest(numbers: Tensor, entries: tuple[float, ...]) -> Tensor:
    """The index of the entry nearest to each number, int32; between two, the lower one."""
    table = _table(entries, numbers.device)
    return torch.bucketize(numbers, (table[:-1] + table[1:]) / 2, out_int32=True)


@lru_cache(maxsize=32)
def _table(entries: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(entries, dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """[256] int64: the two float32 entries of each byte, side by side."""
    table = _table(NF4, device)
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1).view(torch.int64).flatten()
