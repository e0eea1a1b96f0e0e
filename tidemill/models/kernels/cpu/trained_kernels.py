"""Kernels with gradients, for a trainer: attention, norms, rotations and gates.

A backward pass computes again what it needs of the forward pass, from the forward pass's inputs; no other activation is
kept. Sums over rows, the gradients of weights, do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cpu.packed_sequences import Families
from tidemill.models.kernels.cuda.launchers import Gpu
from tidemill.models.kernels.library import knowing
from tidemill.models.kernels.rotation import Rotation


@dataclass(frozen=True)
class Normed:
    """The norm of rows x [..., D] by a weight [D], to be computed when it is needed."""

    compiled: Native | Gpu
    eps: float
    dtype: torch.dtype

    def make(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return self.compiled.norm(x, weight, self.eps, self.dtype)

    def back(self, x: Tensor, weight: Tensor | None, d: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        """(d x, d weight) from the gradient d of `make`'s output; `again` writes that output over d."""
        assert weight is not None
        d_x, d_weight = self.compiled.norm_back(x, weight, self.eps, d, again)
        return d_x, d_weight.to(weight.dtype)


@dataclass(frozen=True)
class Gated:
    """silu(gate) * up of both side by side, x [n, 2 I], to be computed when it is needed."""

    compiled: Native | Gpu
    dtype: torch.dtype

    def make(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return self.compiled.gate(x)

    def back(self, x: Tensor, weight: Tensor | None, d: Tensor, again: bool) -> tuple[Tensor, None]:
        """(d x, None), as `Normed.back`."""
        return self.compiled.gate_back(x, d, again), None


@dataclass(frozen=True)
class Deferred:
    """An output not computed yet, `how` of x, so that its reader need not keep it."""

    how: Normed | Gated
    x: Tensor
    weight: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.how.dtype


def as_tensor(given: Tensor | Deferred) -> Tensor:
    return given if isinstance(given, Tensor) else _Made.apply(given.x, given.weight, given.how)


class Trained:
    """The layer methods of `Native` with gradients; norms and gates are deferred."""

    def __init__(self, compiled: Native | Gpu) -> None:
        self._compiled = compiled

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Deferred:
        rows = x if x.stride(-1) == 1 else x.contiguous()
        return Deferred(Normed(self._compiled, eps, dtype or x.dtype), rows, weight)

    def rotate(self, heads: Tensor, how: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        of_queries, of_keys = (None, None) if how.norms is None else how.norms
        how = replace(how, cos=how.cos.contiguous(), sin=how.sin.contiguous())
        return _Rotate.apply(_dense(heads), of_queries, of_keys, how, self._compiled)

    def gate(self, gate_up: Tensor) -> Deferred:
        return Deferred(Gated(self._compiled, gate_up.dtype), gate_up.contiguous())


def layer_kernels(*tensors: Tensor) -> Native | Gpu | Trained | None:
    """The kernels for a layer's norms, rotations and gates on these tensors; None: use PyTorch's."""
    found = knowing(*tensors)
    if not torch.is_grad_enabled():
        return found
    return None if found is None else Trained(found)


def _dense(heads: Tensor) -> Tensor:
    """[n, heads, E] with dense rows, copied if necessary."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def attention_for(
    q: Tensor, k: Tensor, v: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Families, int | None], Tensor] | None:
    """(q, k, v, families, window) -> `see`'s output with gradients; None if none fits."""
    compiled = knowing(q, k, v)
    if isinstance(compiled, Gpu):
        fits = q.dtype == k.dtype == v.dtype and compiled.trains(q.dtype, q.shape[1], k.shape[1], q.shape[2])
    else:
        fits = all(Native.trains(x.dtype, x.shape[2]) for x in (q, k, v))
    return partial(_Attention.apply, compiled) if compiled is not None and fits else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compiled: Native | Gpu, q: Tensor, k: Tensor, v: Tensor, families: Families, window: int | None
    ) -> Tensor:
        out, totals = compiled.see(q, k, v, families, window)
        ctx.save_for_backward(q, k, v, out, totals)
        ctx.given = compiled, families, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        compiled, families, window = ctx.given
        return None, *compiled.see_back(*ctx.saved_tensors, grads[0], families, window), None, None


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, how: Normed | Gated) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return how.make(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.how.back(*ctx.saved_tensors, grads[0].contiguous(), again=False), None


class _Rotate(torch.autograd.Function):
    """Rotation with a gradient. The values pass through as a view, so that d heads is written once."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, of_queries: Tensor | None, of_keys: Tensor | None, how: Rotation, compiled: Native | Gpu
    ) -> tuple[Tensor, Tensor, Tensor]:
        """of_queries, of_keys: the norm weights of `how`, as arguments for their gradients."""
        ctx.save_for_backward(heads)
        ctx.how, ctx.compiled = how, compiled
        return compiled.rotate(heads, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (heads,), how = ctx.saved_tensors, ctx.how
        d_q, d_k, d_v = map(_dense, grads)
        d_heads, sums = ctx.compiled.rotate_back(heads, how, (d_q, d_k, d_v))
        d_weights = (None, None) if how.norms is None else sums.to(how.norms[0].dtype).unbind()
        return d_heads, *d_weights, None, None
