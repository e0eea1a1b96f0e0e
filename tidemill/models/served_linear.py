"""Linear layers, with a packed copy of their weights for compiled products.

The packed copy holds the weights' own words in the order in which a compiled product reads them (see `served_weights`).
It is used where no gradient is wanted, and is valid only until the weights change. A product that is trained does not
keep the norm or gate that it reads: its backward pass computes that again.
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
from tidemill.models.quantised_linear import Base
from tidemill.models.trained_linear import NARROW, Matrix, mixes, product, widened

_OURS = ("cpu", "cuda")  # devices with products other than PyTorch's own


def wide_product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [n, K] W^T in float32, both narrow, without widening W; None if impossible."""
    if not widens(weight) or x.dtype != weight.dtype or torch.is_grad_enabled():
        return None
    return product(x, weight.T)


def widens(weight: Tensor) -> bool:
    """True if `wide_product` can multiply with this weight."""
    return mixes(weight) and weight.dtype == NARROW


class Packed:
    """The packed copy of a matrix [N, K], if there is one."""

    def __init__(self) -> None:
        self.numbers: Tensor | None = None

    def packing(self, weight: Tensor) -> Work[None]:
        """Pack the matrix, in place of an earlier copy, if a compiled product takes it."""
        compiled, (n, k) = native(), weight.shape
        if compiled is None or not compiled.packs(weight):
            self.numbers = None
            return
        if self.numbers is None:
            self.numbers = torch.empty(-(-n // BLOCK) * BLOCK * k, dtype=weight.dtype)
        blocks = self.numbers.view(-1, BLOCK * k)  # each holds BLOCK rows; the last one is padded
        at = 0
        for (rows,) in by_rows(weight.detach()):
            end = at + -(-len(rows) // BLOCK)
            compiled.pack(rows, blocks[at:end])
            at = end
            yield
        assert at == len(blocks), "it was packed for a matrix of another shape"

    def product(self, x: Tensor, outputs: int, bias: Tensor | None = None, wide: bool = False) -> Tensor | None:
        """x [n, K] times the matrix's transpose; None if that is not possible. wide: return float32."""
        if self.numbers is None or torch.is_grad_enabled() or x.dtype != self.numbers.dtype:
            return None
        compiled = native()
        return None if compiled is None else compiled.linear(x, self.numbers, outputs, bias, wide)


class Linear(nn.Linear):
    """A linear layer, x W^T + b."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.packed = Packed()
        self.gathered: Matrix | None = None  # see `gathering`
        self.adapter: nn.Module | None = None  # adds to the output, see `lora`
        self.base: Base | None = None  # the matrix in few bits, see `quantised_base`; the weight is a shape only

    def onto(self, x: Tensor, input: Tensor | Deferred) -> Tensor:
        """x plus the layer's output for `input`; x itself on a device without a gradient."""
        plain = self.bias is None and self.adapter is None and self.base is None
        adds = plain and x.is_cuda and x.dtype == input.dtype == self.weight.dtype
        if adds and not torch.is_grad_enabled() and isinstance(input, Tensor):
            return x.addmm_(input, self.weight.T)
        return x + self(input)

    def forward(self, input: Tensor | Deferred) -> Tensor:
        if self.adapter is None:
            return self._product(input)
        input = as_tensor(input)
        return self.adapter(input, self._product(input))

    def _product(self, input: Tensor | Deferred) -> Tensor:
        if self.base is not None:
            return self.base(as_tensor(input), self.bias)
        if isinstance(input, Tensor) and (product := self.packed.product(input, self.out_features, self.bias)) is not None:
            return product
        if (dtype := _multiplied_in(input, self.weight)) is not None:
            matrix = self._matrix()
            if isinstance(input, Deferred):
                return _Product.apply(input.x, input.weight, self.weight, self.bias, input.how, dtype, matrix)
            if self.gathered is not None or (dtype != self.weight.dtype and widened(self.weight)):
                return _Product.apply(input, None, self.weight, self.bias, None, dtype, matrix)
        return F.linear(as_tensor(input), self.weight, self.bias)

    def _matrix(self) -> Matrix:
        """The prepared matrix of the present weight; under FSDP that is the gathered one, while it is gathered."""
        if self.gathered is None:
            return Matrix(self.weight)
        if self.gathered.weight is not self.weight:
            self.gathered = Matrix(self.weight, gathers=True, keeps=self.gathered.keeps)
        return self.gathered


@contextmanager
def gathering(*modules: nn.Module, keeps: bool = True) -> Iterator[None]:
    """Context for several passes without a change of weights between them.

    Matrices are prepared once (`keeps`: for all passes, else for each product), and their gradients are added up in their
    `.grad`, unseen by autograd.
    """
    found = {each for module in modules for each in module.modules() if isinstance(each, Linear)}
    here = [each for each in found if each.weight.device.type in _OURS]
    for each in here:
        each.gathered = Matrix(each.weight, gathers=True, keeps=keeps)
    try:
        yield
    finally:
        for each in here:
            each.gathered = None


def _multiplied_in(x: Tensor | Deferred, weight: Tensor) -> torch.dtype | None:
    """The dtype in which x and weight are multiplied; None if PyTorch's own product is used."""
    device = weight.device.type
    if device not in _OURS or (isinstance(x, Tensor) and x.ndim != 2):
        return None
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype else None
    known = x.dtype in (torch.float32, NARROW) and weight.dtype == torch.float32
    return NARROW if known and torch.get_autocast_dtype(device) == NARROW else None


class _Product(torch.autograd.Function):
    """made W^T + b in `dtype`; `made` is x [n, K], or `how` makes it, twice, of x."""

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
        """matrix: of the weight. The weight itself is an argument only for autograd."""
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
