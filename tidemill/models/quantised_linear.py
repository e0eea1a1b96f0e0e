"""Products with a frozen matrix that is held in few bits: made whole in the forward pass, and again in the backward one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tidemill.models.quantised_weights import Quantised, Scales, dequantise
from tidemill.models.trained_linear import NARROW, Matrix


class Base(nn.Module):
    """The Hugging Face matrices [n, K] that are stacked in one matrix [N, K], each in few bits. They are never trained."""

    def __init__(self, parts: Sequence[Quantised]) -> None:
        super().__init__()
        self._kinds = [(part.kind, part.shape) for part in parts]
        self.rows, self.inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.owned = True  # of several ranks, which all hold it, one sends it
        for i, part in enumerate(parts):
            held = (part.codes, part.scales.numbers, part.scales.codes, part.scales.mean)
            for name, tensor in zip(_HELD, held, strict=True):
                self.register_buffer(f"{name}_{i}", tensor, persistent=False)

    def part(self, first: int) -> Tensor:
        """The Hugging Face matrix [n, K] float32 that begins at a row of the stacked one."""
        at = 0
        for i, (_, shape) in enumerate(self._kinds):
            if at == first:
                return dequantise(self._part(i))
            at += shape[0]
        raise AssertionError(f"no matrix begins at row {first}")

    def matrix(self) -> Tensor:
        """The stacked matrix [N, K] float32, made for this call."""
        if len(self._kinds) == 1:
            return self.part(0)
        made = torch.empty(self.rows, self.inputs, device=self.get_buffer("codes_0").device)
        at = 0
        for i, (_, shape) in enumerate(self._kinds):
            made[at : at + shape[0]] = dequantise(self._part(i))
            at += shape[0]
        return made

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, K] times the stacked matrix's transpose, plus b, in the dtype of x or that of autocast."""
        assert bias is None or not bias.requires_grad, "a bias beside a quantised matrix is frozen, too"
        device = x.device.type
        narrows = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == NARROW
        return _Product.apply(x, bias, self, NARROW if narrows and x.dtype == torch.float32 else x.dtype)

    def _part(self, i: int) -> Quantised:
        kind, shape = self._kinds[i]
        codes, numbers, scale_codes, mean = (getattr(self, f"{name}_{i}") for name in _HELD)
        return Quantised(kind, shape, codes, Scales(numbers, scale_codes, mean))


_HELD = ("codes", "numbers", "scale_codes", "mean")


class _Product(torch.autograd.Function):
    """x W^T + b in `dtype`. Nothing is kept for the backward pass, which needs the matrix alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, base: Base, dtype: torch.dtype) -> Tensor:
        ctx.base, ctx.dtype = base, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return Matrix(base.matrix()).forward(x.to(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(grads[0].device.type, enabled=False):
            return Matrix(ctx.base.matrix()).back(grads[0]).to(ctx.dtype), None, None, None
