"""AdamW's two moments of a parameter, in float32 or in 8 bits a number, on the device or in the host's memory.

In 8 bits a block of 256 numbers has one scale, its largest magnitude, and each number is one of 255 fixed shares of it:
dynamic codes, fine near 1 and reaching down to 1e-6 (2110.02861). Here 1 is a code of both signs, so that the largest
number of a block is kept exactly. What was decoded is therefore encoded to the same bits again, and a checkpoint of decoded
numbers changes nothing. Of the second moment the root is kept, because the moment itself reaches over twice as many powers
of ten: one that is rounded to 0 beside a first moment that is not would make a huge step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.host_memory import host_tensors
from tidemill.models.weight_slices import Slice
from tidemill.trainer.trainer_kinds import AdamWSettings

BLOCK = 256  # numbers that share a scale
SMALL = 4096  # tensors with fewer numbers stay in float32
PIECE = 1 << 22  # numbers that are decoded at a time
_DECADES = 7
_LEAST = 2.0**-62  # smaller numbers are 0, because their squares would lose bits


@dataclass(frozen=True, slots=True)
class DecodedBlock(Slice):
    """A block whose numbers are written where they are wanted; its own tensor only has their shape."""

    write: Callable[[Tensor], None] | None = None


class Moments:
    """Both moments of a parameter in float32."""

    def __init__(self, like: Tensor) -> None:
        """like: the parameter, or this process's rows of it."""
        self.like = like
        self.held = self._shapes()  # without memory until `allocate`

    def _shapes(self) -> list[Tensor]:
        return [torch.empty(self.like.shape, dtype=self.like.dtype, device="meta") for _ in range(2)]

    @property
    def whole(self) -> bool:
        """True if they can be stepped as they are held."""
        return self.held[0].device == self.like.device

    def pieces(self) -> Iterator[slice]:
        """Parts of the parameter's numbers that are stepped one after another."""
        for start in range(0, self.like.numel(), PIECE):
            yield slice(start, min(start + PIECE, self.like.numel()))

    def load(self, part: slice) -> list[Tensor]:
        """Both moments of a part, on the parameter's device."""
        return [held.view(-1)[part].to(self.like.device, non_blocking=True) for held in self.held]

    def store(self, part: slice, values: list[Tensor]) -> None:
        for held, new in zip(self.held, values, strict=True):
            held.view(-1)[part].copy_(new)  # to the host this waits, so that what is there is always whole

    def block(self, index: int, block: Slice) -> Slice:
        """One of the moments for a checkpoint, as the block of its parameter."""
        return Slice(block.name, block.shape, block.offset, self.held[index])

    def restore(self, values: list[Tensor]) -> None:
        for part in self.pieces():
            self.store(part, [value.reshape(-1)[part].to(self.like.device) for value in values])


class EightBitMoments(Moments):
    """Both moments of a parameter in 8 bits a number."""

    @property
    def whole(self) -> bool:
        return False

    def _shapes(self) -> list[Tensor]:
        blocks = -(-self.like.numel() // BLOCK)
        codes = [torch.empty(blocks, BLOCK, dtype=torch.uint8, device="meta") for _ in range(2)]
        return [*codes, *(torch.empty(blocks, device="meta") for _ in range(2))]

    def load(self, part: slice) -> list[Tensor]:
        return [self._decoded(index, part) for index in range(2)]

    def store(self, part: slice, values: list[Tensor]) -> None:
        rows = _rows(part)
        for index, new in enumerate(values):
            root = new.sqrt() if index else new
            codes, scales = encoded(root, signed=not index)
            self.held[index][rows].copy_(codes)
            self.held[2 + index][rows].copy_(scales)

    def _decoded(self, index: int, part: slice) -> Tensor:
        rows, device = _rows(part), self.like.device
        codes, scales = (self.held[i][rows].to(device, non_blocking=True) for i in (index, 2 + index))
        root = decoded(codes, scales, signed=not index).view(-1)[: part.stop - part.start]
        return root.square_() if index else root

    def block(self, index: int, block: Slice) -> Slice:
        def write(into: Tensor) -> None:
            for part in self.pieces():
                into.view(-1)[part].copy_(self._decoded(index, part))

        return DecodedBlock(block.name, block.shape, block.offset, self.like, write=write)


def made_for(parameters: Mapping[str, Tensor], settings: AdamWSettings) -> dict[str, Moments]:
    """Moments of zero for these parameters, or rows of parameters, where and as the settings say."""
    eight = settings.moments == "int8"
    made = {name: (EightBitMoments if eight and p.numel() >= SMALL else Moments)(p) for name, p in parameters.items()}
    shapes = [shape for moments in made.values() for shape in moments.held]
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    if settings.moments_on == "host" and device.type != "cpu":
        memory = iter(host_tensors(shapes, device))
    else:
        memory = iter(torch.zeros(shape.shape, dtype=shape.dtype, device=device) for shape in shapes)
    for moments in made.values():
        moments.held = [next(memory) for _ in moments.held]
        if isinstance(moments, EightBitMoments):
            moments.held[0].fill_(len(_codes(True)) // 2)  # the code of 0 among signed ones
    return made


def encoded(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes [B, 256] uint8 and scales [B] of values [n] float32, padded with zeros to whole blocks."""
    table, bounds = _codes(signed).to(values.device), _bounds(signed).to(values.device)
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scales = torch.where(scales < _LEAST, 0.0, scales)
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(shares, bounds, out_int32=True)
    tiny = (table[codes].abs() * scales[:, None]) < _LEAST
    return codes.masked_fill_(tiny, len(table) // 2 if signed else 0).to(torch.uint8), scales


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Values [B, 256] of codes [B, 256] and scales [B]."""
    return _codes(signed).to(codes.device)[codes.int()] * scales[:, None]


def _rows(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


@lru_cache(maxsize=2)
def _codes(signed: bool) -> Tensor:
    """The 255 numbers that codes stand for, ascending from -1 or from 0 to 1.

    Each decade below 1 is cut into twice as many parts as the one below it.
    """
    found = [0.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade + (not signed))
        found += (10.0 ** (decade - _DECADES + 1) * torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)[1:]).tolist()
    below = [-number for number in reversed(found[1:])] if signed else []
    return torch.tensor([*below, *found], dtype=torch.float32)


@lru_cache(maxsize=2)
def _bounds(signed: bool) -> Tensor:
    """The middles between neighbouring codes."""
    codes = _codes(signed).double()
    return ((codes[:-1] + codes[1:]) / 2).float()
