"""Dropout of what an adapter reads, whose masks are hashes and no random state.

    tokens of a row -> prefix hash of each -> with (seed, update, module): a key for its row in a product -> drop or keep

As in PEFT, each projection has a mask of its own: lora_B(lora_A(dropout(x))). A mask follows from the seed, the number of
the update, the module's name and the tokens up to the row's own. So a gradient does not depend on how rows are packed, which
of them share a prefix, and which thread or rank computes them, and a run that goes on repeats it. Masks are made again in
the backward pass: nothing is kept for them. Only a training pass drops, by being inside `Dropping`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidemill.core.seeding import derive_seed
from tidemill.core.types import Array
from tidemill.models.trained_linear import NARROW

PIECE = 1 << 20  # numbers whose masks are made at a time, which bounds memory
STEP = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64 (Steele et al., OOPSLA 2014): its counter's step and its mixing, as int64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one optimizer update."""

    seed: int
    update: int

    def of(self, rows: Tensor, wanted: Tensor | None) -> DroppedRows:
        """The dropout of a pass. rows: [N] int64, of each packed token its prefix hash. wanted: as in `Decoder.forward`."""
        return DroppedRows(self, rows, rows if wanted is None else rows.index_select(0, wanted))


@dataclass(frozen=True, slots=True, eq=False)
class DroppedRows:
    """The rows of a pass whose adapters drop inputs."""

    dropout: Dropout
    every: Tensor  # [N] int64: prefix hashes of the packed tokens
    wanted: Tensor  # [P] int64: of those that the end of the last layer computes

    def mask(self, module: str, share: float, last: bool) -> Mask:
        """The mask of what a module reads. last: only the wanted rows come to it."""
        salt = derive_seed(self.dropout.seed, "dropout", self.dropout.update, module)
        return Mask(self.wanted if last else self.every, salt, share)


_PRESENT = threading.local()  # rows: of the pass that this thread is in


class Dropping(AbstractContextManager[None]):
    """Context of a decoder's forward pass, in which its adapters drop inputs of these rows; None: they drop nothing."""

    def __init__(self, rows: DroppedRows | None) -> None:
        self._rows = rows
        self._before: DroppedRows | None = None

    def __enter__(self) -> None:
        self._before, _PRESENT.rows = dropped_rows(), self._rows

    def __exit__(self, *_: object) -> None:
        _PRESENT.rows = self._before


def dropped_rows() -> DroppedRows | None:
    """The rows of the pass that this thread is in; None if it drops nothing."""
    return getattr(_PRESENT, "rows", None)


def recomputing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer's forward pass and of its recomputation, which drops the same (`context_fn` of a checkpoint).

    The recomputation may run in another thread, one of autograd's.
    """
    return nullcontext(), Dropping(dropped_rows())


def prefix_hashes(tokens: Array) -> Tensor:
    """[T] int64: for each token of a row a hash of the tokens up to it."""
    places = torch.arange(1, len(tokens) + 1) * STEP
    return _mixed(_mixed(torch.from_numpy(tokens.astype(np.int64)) + places).cumsum(0))


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The choice of the numbers that are dropped of what a module reads, [n, K]."""

    rows: Tensor  # [n] int64: prefix hashes
    salt: int  # of the seed, the update and the module
    share: float  # of the numbers that are dropped

    def drop(self, x: Tensor) -> Tensor:
        """x [n, K] with some of its numbers 0, and the others divided by 1 - share."""
        k, keys = x.shape[1], _mixed(self.rows ^ self.salt)
        places = torch.arange((k + 1) // 2, device=x.device) * STEP
        least = min(round(self.share * 2**32), 2**32 - 1) - 2**31
        out, rows = torch.empty_like(x), max(1, PIECE // k)
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            numbers = _mixed(keys[part, None] + places).view(torch.int32)[:, :k]  # each hash has two numbers
            torch.mul(x[part], numbers >= least, out=out[part])
        return out.mul_(1 / (1 - self.share))


def dropped_product(x: Tensor, a: Tensor, mask: Mask) -> Tensor:
    """drop(x [n, K]) A^T, which keeps x for the backward pass, as other products of it do, and no mask."""
    device = x.device.type
    narrows = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == NARROW
    return _Product.apply(x, a, mask, NARROW if narrows and x.dtype == torch.float32 else x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, mask: Mask, dtype: torch.dtype) -> Tensor:
        """dtype: in which both are multiplied."""
        ctx.save_for_backward(x, a)
        ctx.mask, ctx.dtype = mask, dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(mask.drop(x).to(dtype), a.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, a), (d,) = ctx.saved_tensors, grads
        for_x, for_a, *_ = ctx.needs_input_grad
        with torch.autocast(d.device.type, enabled=False):
            d_a = (d.T @ ctx.mask.drop(x).to(ctx.dtype)).to(a.dtype) if for_a else None
            d_x = ctx.mask.drop((d @ a.to(ctx.dtype)).to(x.dtype)) if for_x else None
        return d_x, d_a, None, None


def _mixed(numbers: Tensor) -> Tensor:
    """SplitMix64's mixing of int64 numbers, in place; shifts bring zeros in."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers *= factor
    numbers ^= (numbers >> 31) & ((1 << 33) - 1)
    return numbers
