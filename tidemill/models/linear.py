"""A linear layer that can keep its weights once more, in the order in which a compiled product reads them.

The copy is for weights that are served, not for ones that are trained: it is used where no gradient is wanted, and is right
only until the weights change. It holds the weights' own words, in another order: see `models.served`. Products that are
trained in bfloat16 are widened on a CPU that is quicker so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tidemill.kernels.library import native
from tidemill.kernels.native import BLOCK, WIDENED
from tidemill.models.pieces import Work, by_rows

NARROW, ROWS = torch.bfloat16, 512  # rows that are widened at a time
MIXES = "dtype" in torch.ops.aten.mm.overloads()  # PyTorch 2.8 and later multiply narrow matrices into a wide one


def wide_product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [n, K] times the transpose of a weight [N, K] of the same narrow dtype, in float32, without ever widening the
    weight; None where it is not to be had."""
    if not widens(weight) or x.dtype != weight.dtype or torch.is_grad_enabled():
        return None
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def widens(weight: Tensor) -> bool:
    """Whether `wide_product` is for it."""
    return MIXES and weight.is_cuda and weight.dtype == torch.bfloat16


class Packed:
    """A matrix [N, K] in that order."""

    def __init__(self) -> None:
        self.numbers: Tensor | None = None

    def packing(self, weight: Tensor) -> Work[None]:
        """In place where a matrix of this shape was packed before. Does nothing where no compiled product fits."""
        compiled, (n, k) = native(), weight.shape
        if compiled is None or not compiled.packs(weight):
            self.numbers = None
            return
        if self.numbers is None:
            self.numbers = torch.empty(-(-n // BLOCK) * BLOCK * k, dtype=weight.dtype)
        blocks = self.numbers.view(-1, BLOCK * k)  # each of BLOCK rows, the last one filled up
        at = 0
        for (rows,) in by_rows(weight.detach()):
            end = at + -(-len(rows) // BLOCK)
            compiled.pack(rows, blocks[at:end])
            at = end
            yield
        assert at == len(blocks), "it was packed for a matrix of another shape"

    def product(self, x: Tensor, outputs: int, bias: Tensor | None = None, wide: bool = False) -> Tensor | None:
        """x [n, K] times the matrix's transpose, in float32 when `wide`; None where it is not to be had."""
        if self.numbers is None or torch.is_grad_enabled() or x.dtype != self.numbers.dtype:
            return None
        compiled = native()
        return None if compiled is None else compiled.linear(x, self.numbers, outputs, bias, wide)


class Linear(nn.Linear):
    """x W^T + b"""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.packed = Packed()

    def onto(self, x: Tensor, input: Tensor) -> Tensor:
        """x + what comes out of `input`. On a device, and without a gradient, x itself takes it: it is used up."""
        if x.is_cuda and x.dtype == input.dtype == self.weight.dtype and self.bias is None and not torch.is_grad_enabled():
            return x.addmm_(input, self.weight.T)
        return x + self(input)

    def forward(self, input: Tensor) -> Tensor:
        product = self.packed.product(input, self.out_features, self.bias)
        if product is None and _would_be_narrowed(input, self.weight) and floats_are_quicker():
            return _Rounded.apply(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias) if product is None else product


def prepares_sizes(device: str, narrow: bool) -> bool:
    """Whether products of the trainer prepare something for each size they meet, and keep it: oneDNN's of bfloat16."""
    return device == "cpu" and narrow and not floats_are_quicker()


def floats_are_quicker() -> bool:
    """Whether the CPU multiplies what is bfloat16 faster when it is widened before."""
    compiled = native()
    return compiled is not None and compiled.products[NARROW] == WIDENED


def _would_be_narrowed(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast multiplies these as bfloat16, on a CPU."""
    on_cpu = x.device.type == weight.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    known = x.ndim == 2 and x.dtype in (torch.float32, NARROW) and weight.dtype == torch.float32
    return on_cpu and known and torch.get_autocast_dtype("cpu") == NARROW


class _Rounded(torch.autograd.Function):
    """x W^T + b of what is rounded to bfloat16, summed up in float32 and rounded once, as autocast's is. Gradients of the
    weights are not rounded, where autocast's are, once a micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow, out = x.to(NARROW), x.new_empty((len(x), len(weight)), dtype=NARROW)
        ctx.save_for_backward(narrow, weight)
        ctx.dtype = x.dtype
        with torch.autocast("cpu", enabled=False):
            wide, added = _rounded(weight), None if bias is None else _rounded(bias)
            for rows in _parts(len(x)):
                out[rows] = F.linear(narrow[rows].float(), wide, added)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (narrow, weight), (d,) = ctx.saved_tensors, grads
        for_x, for_weight, for_bias = ctx.needs_input_grad
        d_x = torch.empty_like(narrow) if for_x else None
        d_weight = torch.zeros_like(weight) if for_weight else None
        d_bias = weight.new_zeros(len(weight)) if for_bias else None
        with torch.autocast("cpu", enabled=False):
            wide = _rounded(weight)
            for rows in _parts(len(d)):
                part = d[rows].float()
                if d_x is not None:
                    d_x[rows] = part @ wide
                if d_weight is not None:
                    d_weight.addmm_(part.T, narrow[rows].float())
                if d_bias is not None:
                    d_bias += part.sum(0)
        return None if d_x is None else d_x.to(ctx.dtype), d_weight, d_bias


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.to(NARROW).float()


def _parts(rows: int) -> list[slice]:
    return [slice(begin, begin + ROWS) for begin in range(0, rows, ROWS)]
