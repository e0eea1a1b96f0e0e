"""A linear layer that can keep its weights once more, in the order in which a compiled product reads them.

The copy is for weights that are served, not for ones that are trained: it is used where no gradient is wanted, and is right
only until the weights change. It holds the weights' own words, in another order: see `served_weights`. A product that is
trained does not keep the norm or the gate it reads: its way back makes that again. In bfloat16 it is widened on a CPU that
is quicker so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tidemill.models.kernels.cpu.bindings import BLOCK
from tidemill.models.kernels.cpu.trained_kernels import Deferred, Gated, Normed, as_tensor
from tidemill.models.kernels.library import native
from tidemill.models.piecewise import Work, by_rows
from tidemill.models.trained_linear import NARROW, Matrix, mixes, product, widened

_OURS = ("cpu", "cuda")  # where products may be other ones than PyTorch's own


def wide_product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [n, K] times the transpose of a weight [N, K] of the same narrow dtype, in float32, without ever widening the
    weight; None where it is not to be had."""
    if not widens(weight) or x.dtype != weight.dtype or torch.is_grad_enabled():
        return None
    return product(x, weight.T)


def widens(weight: Tensor) -> bool:
    """Whether `wide_product` is for it."""
    return mixes(weight) and weight.dtype == NARROW


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
        self.gathered: Matrix | None = None  # see `gathering`

    def onto(self, x: Tensor, input: Tensor | Deferred) -> Tensor:
        """x + what comes out of `input`. On a device, and without a gradient, x itself takes it: it is used up."""
        adds = x.is_cuda and x.dtype == input.dtype == self.weight.dtype and self.bias is None
        if adds and not torch.is_grad_enabled() and isinstance(input, Tensor):
            return x.addmm_(input, self.weight.T)
        return x + self(input)

    def forward(self, input: Tensor | Deferred) -> Tensor:
        if isinstance(input, Tensor) and (product := self.packed.product(input, self.out_features, self.bias)) is not None:
            return product
        if (dtype := _multiplied_in(input, self.weight)) is not None:
            matrix = self.gathered or Matrix(self.weight)
            if isinstance(input, Deferred):
                return _Product.apply(input.x, input.weight, self.weight, self.bias, input.how, dtype, matrix)
            if self.gathered is not None or (dtype != self.weight.dtype and widened(self.weight)):
                return _Product.apply(input, None, self.weight, self.bias, None, dtype, matrix)
        return F.linear(as_tensor(input), self.weight, self.bias)


@contextmanager
def gathering(*modules: nn.Module) -> Iterator[None]:
    """While passes are computed, between which no weight changes: matrices are prepared once, and their gradients are added
    up in their `.grad`, where autograd does not see them."""
    found = {each for module in modules for each in module.modules() if isinstance(each, Linear)}
    here = [each for each in found if each.weight.device.type in _OURS]
    for each in here:
        each.gathered = Matrix(each.weight, gathers=True)
    try:
        yield
    finally:
        for each in here:
            each.gathered = None


def _multiplied_in(x: Tensor | Deferred, weight: Tensor) -> torch.dtype | None:
    """The dtype to which autocast narrows these, or their own; None where products are PyTorch's own."""
    device = weight.device.type
    if device not in _OURS or (isinstance(x, Tensor) and x.ndim != 2):
        return None
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype else None
    known = x.dtype in (torch.float32, NARROW) and weight.dtype == torch.float32
    return NARROW if known and torch.get_autocast_dtype(device) == NARROW else None


class _Product(torch.autograd.Function):
    """made W^T + b, where `made` is what `how` makes of x and its own weight, which is not kept, but made again on the way
    back; or x [n, K] itself. It is multiplied in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        how: Normed | Gated | None,
        dtype: torch.dtype,
        matrix: Matrix,
    ) -> Tensor:
        """matrix: of the weight, which is given for autograd."""
        made = x.to(dtype) if how is None else how.make(x, own)
        ctx.save_for_backward(made if how is None else x, own, weight)
        ctx.how, ctx.matrix, ctx.dtype = how, matrix, x.dtype
        with torch.autocast(weight.device.type, enabled=False):
            return matrix.forward(made, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, own, _), how, matrix, d = ctx.saved_tensors, ctx.how, ctx.matrix, grads[0]
        for_x, for_own, for_weight, for_bias, *_ = ctx.needs_input_grad
        d_x = d_own = d_weight = d_bias = None
        with torch.autocast(d.device.type, enabled=False):
            if for_x or for_own:
                d_x = matrix.back(d)
            if how is None:
                made, d_x = x, None if d_x is None else d_x.to(ctx.dtype)
            elif d_x is None:
                made = how.make(x, own)
            else:
                made = d_x
                d_x, d_own = how.back(x, own, made, again=True)
            if for_weight:
                d_weight = matrix.gradient(d, made)
            if for_bias:
                d_bias = matrix.bias_gradient(d)
        return d_x, d_own, d_weight, d_bias, None, None, None
