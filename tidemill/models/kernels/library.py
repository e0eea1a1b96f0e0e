"""Access to this process's kernels: loaded and checked once, or the reason there are none.

    native() -> Native, or None and `why_not()`       for the CPU
    gpu() -> Gpu, or None and `why_not_gpu()`         for CUDA devices
    TIDEMILL_KERNELS=off                              switches them off

Kernels that fail a small check at the start are not used.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

from tidemill.models.kernels.cpu import compilation, cpu_check
from tidemill.models.kernels.cpu.bindings import Native
from tidemill.models.kernels.cpu.compilation import Unavailable
from tidemill.models.kernels.cuda import cuda_check
from tidemill.models.kernels.cuda.launchers import DTYPES, Gpu

SWITCH = "TIDEMILL_KERNELS"  # "off": use no kernels


@lru_cache(maxsize=1)
def _found() -> Native | Unavailable:
    try:
        _expect_wanted()
        return _load()
    except Unavailable as reason:
        return reason
    except OSError as error:
        return Unavailable(f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def _found_gpu() -> Gpu | Unavailable:
    try:
        _expect_wanted()
        if not torch.cuda.is_available():
            raise Unavailable("no CUDA device is visible here")
        kernels = Gpu()
        if not cuda_check.right(kernels, torch.device("cuda")):
            raise Unavailable("the kernels compute something else than they should")
        return kernels
    except Unavailable as reason:
        return reason
    except Exception as error:  # Triton compiles here, with whatever tools this machine has: many things can be amiss
        return Unavailable(f"{type(error).__name__}: {error}")


def native() -> Native | None:
    """The compiled kernels; None if there are none. The first call may compile for some seconds."""
    found = _found()
    return found if isinstance(found, Native) else None


def gpu() -> Gpu | None:
    """The CUDA device's kernels; None if there are none. The first call may compile for some seconds."""
    found = _found_gpu()
    return found if isinstance(found, Gpu) else None


def knowing(*tensors: Tensor) -> Native | Gpu | None:
    """The kernels for these tensors' dtypes and their common device; None if there are none."""
    first = tensors[0]
    if any(t.dtype not in DTYPES or t.device != first.device for t in tensors):
        return None
    if first.device.type == "cuda":
        return gpu()
    return native() if first.device.type == "cpu" else None


def without_gradient(*tensors: Tensor) -> Native | Gpu | None:
    """The kernels for these tensors if no gradient is wanted (see `layer_kernels`)."""
    return None if torch.is_grad_enabled() else knowing(*tensors)


def why_not() -> str:
    """The reason why `native` returns None; "" if it does not."""
    found = _found()
    return str(found) if isinstance(found, Unavailable) else ""


def why_not_gpu() -> str:
    """The reason why `gpu` returns None; "" if it does not."""
    found = _found_gpu()
    return str(found) if isinstance(found, Unavailable) else ""


def _expect_wanted() -> None:
    if os.environ.get(SWITCH, "") == "off":
        raise Unavailable(f"switched off by {SWITCH}")


def _load() -> Native:
    compiler, reason = compilation.find_compiler(), ""
    for extra in compilation.variants():
        try:
            library = Native(compilation.compiled(compiler, extra))
            cpu_check.expect_right(library)
            return library
        except (Unavailable, OSError) as error:
            reason = str(error)
    raise Unavailable(reason)
