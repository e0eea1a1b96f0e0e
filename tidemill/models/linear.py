"""A linear layer that can keep its weights once more, in the order in which a compiled product reads them.

The copy is for weights that are served, not for ones that are trained: it is used where no gradient is wanted, and is right
only until the weights change. It holds the weights' own words, in another order: see `models.served`. A product that is
trained does not keep the norm or the gate it reads: its way back makes that again. In bfloat16 it is widened on a CPU that
is quicker so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tidemill.kernels.library import native
from tidemill.kernels.native import BLOCK, WIDENED
from tidemill.kernels.trained import Deferred, Gated, Normed, as_tensor
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

    def onto(self, x: Tensor, input: Tensor | Deferred) -> Tensor:
        """x + what comes out of `input`. On a device, and without a gradient, x itself takes it: it is used up."""
        adds = x.is_cuda and x.dtype == input.dtype == self.weight.dtype and self.bias is None
        if adds and not torch.is_grad_enabled() and isinstance(input, Tensor):
            return x.addmm_(input, self.weight.T)
        return x + self(input)

    def forward(self, input: Tensor | Deferred) -> Tensor:
        if isinstance(input, Tensor) and (product := self.packed.product(input, self.out_features, self.bias)) is not None:
            return product
        narrows = _narrows(input, self.weight)
        rounds = narrows and floats_are_quicker()
        if isinstance(input, Deferred) and (narrows or input.dtype == self.weight.dtype):
            return _Product.apply(input.x, input.weight, self.weight, self.bias, input.how, rounds)
        if rounds:
            return _Product.apply(input, None, self.weight, self.bias, None, rounds)
        return F.linear(as_tensor(input), self.weight, self.bias)


def prepares_sizes(device: str, narrow: bool) -> bool:
    """Whether products of the trainer prepare something for each size they meet, and keep it: oneDNN's of bfloat16."""
    return device == "cpu" and narrow and not floats_are_quicker()


def floats_are_quicker() -> bool:
    """Whether the CPU multiplies what is bfloat16 faster when it is widened before."""
    compiled = native()
    return compiled is not None and compiled.products[NARROW] == WIDENED


def _narrows(x: Tensor | Deferred, weight: Tensor) -> bool:
    """Whether autocast multiplies these as bfloat16, on a CPU."""
    if isinstance(x, Tensor) and (x.device.type != "cpu" or x.ndim != 2):
        return False
    known = weight.device.type == "cpu" and x.dtype in (torch.float32, NARROW) and weight.dtype == torch.float32
    return known and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == NARROW


class _Product(torch.autograd.Function):
    """made W^T + b, where `made` is what `how` makes of x and its own weight, which is not kept, but made again on the way
    back; or x [n, K] itself, where it is rounded. `rounds`: of what is rounded to bfloat16, summed up in float32 and rounded
    once, as autocast's is; gradients of the weights are not rounded then, where autocast's are, once a micro-batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        how: Normed | Gated | None,
        rounds: bool,
    ) -> Tensor:
        made = x.to(NARROW) if how is None else how.make(x, own)
        multiplied = weight if rounds else weight.to(made.dtype)
        ctx.save_for_backward(made if how is None else x, own, multiplied)
        ctx.how, ctx.rounds, ctx.dtypes = how, rounds, (x.dtype, weight.dtype)
        with torch.autocast("cpu", enabled=False):
            if not rounds:
                return F.linear(made, multiplied, None if bias is None else bias.to(made.dtype))
            out = x.new_empty((len(x), len(weight)), dtype=NARROW)
            wide, added = _rounded(weight), None if bias is None else _rounded(bias)
            for rows in _parts(len(x)):
                out[rows] = F.linear(made[rows].float(), wide, added)
            return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, own, weight = ctx.saved_tensors
        how, rounds, (dtype, weight_dtype), d = ctx.how, ctx.rounds, ctx.dtypes, grads[0]
        for_x, for_own, for_weight, for_bias, *_ = ctx.needs_input_grad
        d_x = d_own = d_weight = d_bias = None
        with torch.autocast("cpu", enabled=False):
            if for_x or for_own:
                d_x = _product(d, weight, rounds)
            if how is None:
                made, d_x = x, None if d_x is None else d_x.to(dtype)
            elif d_x is None:
                made = how.make(x, own)
            else:
                made = d_x
                d_x, d_own = how.back(x, own, made, again=True)
            if for_weight:
                d_weight = _outer(d, made, rounds).to(weight_dtype)
            if for_bias:
                d_bias = d.sum(0, dtype=torch.float32 if rounds else None).to(weight_dtype)
        return d_x, d_own, d_weight, d_bias, None, None


def _product(d: Tensor, weight: Tensor, rounds: bool) -> Tensor:
    """d [n, N] times a weight [N, K]."""
    if not rounds:
        return d @ weight
    out, wide = d.new_empty((len(d), weight.shape[1])), _rounded(weight)
    for rows in _parts(len(d)):
        out[rows] = d[rows].float() @ wide
    return out


def _outer(d: Tensor, x: Tensor, rounds: bool) -> Tensor:
    """The transpose of d [n, N] times x [n, K]."""
    if not rounds:
        return d.T @ x
    out = d.new_zeros((d.shape[1], x.shape[1]), dtype=torch.float32)
    for rows in _parts(len(d)):
        out.addmm_(d[rows].float().T, x[rows].float())
    return out


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.to(NARROW).float()


def _parts(rows: int) -> list[slice]:
    return [slice(begin, begin + ROWS) for begin in range(0, rows, ROWS)]
