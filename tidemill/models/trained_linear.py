"""Products with a trained matrix W [N, K] and their gradients.

An input is x [n, K], the output x W^T + b, and d [n, N] the loss's gradient by the output. The backward pass computes d
W and the matrix's gradient d^T x. While no weight changes between passes (`served_linear.gathering`), a matrix is
prepared once for all of them: where the engine's compiled bfloat16 products add up pairs, the trainer uses them too.
Gradients are added up in place without rounding; autograd would round each micro-batch's gradient first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.kernels.cpu.bindings import PAIRED, WIDENED, Native
from tidemill.models.kernels.library import native

NARROW, ROWS = torch.bfloat16, 512  # ROWS are widened at a time
# PyTorch 2.8 and later multiply narrow matrices on a CUDA device into a wide one
MIXES = "dtype" in torch.ops.aten.mm.overloads() and "dtype_out" in torch.ops.aten.addmm.overloads()


class Matrix:
    """A weight and its copies in the forms that products read.

    An input narrower than the weight is multiplied in its own dtype, summed in float32 and rounded once, as under
    autocast; it is widened first on a CPU that is faster so.
    """

    def __init__(self, weight: Tensor, *, gathers: bool = False, keeps: bool = True) -> None:
        """gathers: the weight does not change while this exists, and gradients go to its `.grad`. keeps: its copies, too."""
        self._weight, self._gathers, self.keeps = weight, gathers, keeps
        self._lock = threading.Lock()  # several threads may multiply with it
        self._copies: dict[str, Tensor] = {}  # by the product that reads them

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, in the dtype of x."""
        bias = None if bias is None else bias.detach().to(x.dtype)
        if self._widens(x):
            out, wide = x.new_empty((len(x), len(self._weight))), self._rounded()
            for rows in parts(len(x)):
                out[rows] = F.linear(x[rows].float(), wide, None if bias is None else bias.float())
            return out
        if (compiled := self._compiled(x)) is not None:
            return compiled.linear(_dense(x), self._in_order(compiled, back=False), len(self._weight), bias)
        return F.linear(x, self._read(x.dtype), bias)

    def back(self, d: Tensor) -> Tensor:
        """d W, in the dtype of d."""
        if self._widens(d):
            out, wide = d.new_empty((len(d), self._weight.shape[1])), self._rounded()
            for rows in parts(len(d)):
                out[rows] = d[rows].float() @ wide
            return out
        if (compiled := self._compiled(d)) is not None:
            return compiled.linear(_dense(d), self._in_order(compiled, back=True), self._weight.shape[1])
        return d @ self._read(d.dtype)

    @property
    def weight(self) -> Tensor:
        return self._weight

    def gradient(self, d: Tensor, x: Tensor) -> Tensor | None:
        """d^T x in the weight's dtype; None if it was added to the weight's gradient."""
        if not self._gathers:
            return self._outer(d, x, None)
        with self._lock:  # bounded: by a product
            return self._outer(d, x, self._sums())

    def _outer(self, d: Tensor, x: Tensor, sums: Tensor | None) -> Tensor | None:
        if self._widens(d):
            added = d.new_zeros(self._weight.shape, dtype=torch.float32) if sums is None else sums
            for rows in parts(len(d)):
                added.addmm_(d[rows].float().T, x[rows].float())
            return None if added is sums else added
        if sums is None:
            return (d.T @ x).to(self._weight.dtype)
        if (compiled := self._compiled(d)) is not None and compiled.adds_outer(d, x):
            compiled.add_outer(_dense(d), _dense(x), sums)
        else:
            add_product(sums, d.T, x)
        return None

    def bias_gradient(self, d: Tensor) -> Tensor:
        return d.sum(0, dtype=torch.float32 if self._widens(d) else None).to(self._weight.dtype)

    def _sums(self) -> Tensor:
        if self._weight.grad is None:
            self._weight.grad = torch.zeros_like(self._weight, memory_format=torch.contiguous_format)
        return self._weight.grad

    def _widens(self, x: Tensor) -> bool:
        return x.dtype == NARROW and widened(self._weight)

    def _compiled(self, x: Tensor) -> Native | None:
        """The compiled kernels if they are to multiply x; else None."""
        compiled = native() if self._gathers and x.is_cpu and x.dtype == NARROW and pairs_are_ours() else None
        return compiled if compiled is not None and not any(size % 32 for size in self._weight.shape) else None

    def _in_order(self, compiled: Native, back: bool) -> Tensor:
        def pack() -> Tensor:
            narrow = self._weight.detach().to(NARROW)
            return compiled.pack(narrow.T.contiguous() if back else narrow)

        return self._copy("back" if back else "forward", pack)

    def _read(self, dtype: torch.dtype) -> Tensor:
        if dtype == self._weight.dtype:
            return self._weight.detach()
        return self._copy("narrow", lambda: self._weight.detach().to(dtype))

    def _copy(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if not self.keeps:
            return make()
        with self._lock:  # bounded: by a product, or a copy
            if name not in self._copies:
                self._copies[name] = make()
            return self._copies[name]

    def _rounded(self) -> Tensor:
        return self._weight.detach().to(NARROW).float()


def widened(weight: Tensor) -> bool:
    """True if bfloat16 inputs are widened before they are multiplied with this weight."""
    return weight.is_cpu and weight.dtype != NARROW and floats_are_quicker()


def mixes(a: Tensor) -> bool:
    """True if bfloat16 matrices on this tensor's device are multiplied into float32 directly."""
    return MIXES and a.is_cuda


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b; float32 if they are bfloat16 on a device that multiplies them so."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == NARROW and mixes(a) else a @ b


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to the sums, in float32 where the device can."""
    if a.dtype == sums.dtype:
        sums.addmm_(a, b)
    elif mixes(a) and sums.dtype == torch.float32:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        sums.add_(a @ b)


def prepares_sizes(device: str, narrow: bool) -> bool:
    """True if the trainer's products keep something by size, as oneDNN's do."""
    return device == "cpu" and narrow and not floats_are_quicker() and not pairs_are_ours()


def floats_are_quicker() -> bool:
    """True if this CPU multiplies bfloat16 faster after widening it."""
    return _way() == WIDENED


def pairs_are_ours() -> bool:
    """True if this CPU adds up pairs of bfloat16, as fast as oneDNN or faster."""
    return _way() == PAIRED


def parts(rows: int) -> list[slice]:
    return [slice(begin, begin + ROWS) for begin in range(0, rows, ROWS)]


def _way() -> int | None:
    compiled = native()
    return None if compiled is None else compiled.products[NARROW]


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
