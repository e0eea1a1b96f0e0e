"""A linear layer that can keep its weights once more, in the order in which a compiled product reads them.

The copy is for weights that are served, not for ones that are trained: it is used where no gradient is wanted, and is right
only until the weights change. It holds the weights' own words, in another order: see `models.served`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.kernels.library import native


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

    def forward(self, input: Tensor) -> Tensor:
        product = self.packed.product(input, self.out_features, self.bias)
        return F.linear(input, self.weight, self.bias) if product is None else product
