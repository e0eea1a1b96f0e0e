"""A linear layer that can keep its weights once more, in the order in which a compiled product reads them.

The copy is for weights that are served, not for ones that are trained: it is used where no gradient is wanted, and is right
only until the weights change. It holds the weights' own words, in another order: see `models.served`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.kernels.library import native

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

    def pack(self, weight: Tensor) -> None:
        """In place where a matrix of this shape was packed before. Does nothing where no compiled product fits."""
        compiled = native()
        fits = compiled is not None and compiled.packs(weight)
        self.numbers = compiled.pack(weight.detach(), self.numbers) if compiled is not None and fits else None

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
        return F.linear(input, self.weight, self.bias) if product is None else product
