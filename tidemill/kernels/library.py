"""The compiled kernels of this process: found, tried, or why there are none.

    native() -> Native, or None and `why_not()`       TIDEMILL_KERNELS=off switches them off

A library that computes something else than it should, in a small trial, is not used.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

from tidemill.kernels import building
from tidemill.kernels.building import Unavailable
from tidemill.kernels.gpu import DTYPES, SWITCH, Gpu, gpu
from tidemill.kernels.native import Native
from tidemill.kernels.trial import expect_right


@lru_cache(maxsize=1)
def _found() -> Native | Unavailable:
    if os.environ.get(SWITCH, "") == "off":
        return Unavailable(f"switched off by {SWITCH}")
    try:
        return _load()
    except Unavailable as reason:
        return reason
    except OSError as error:
        return Unavailable(f"{type(error).__name__}: {error}")


def native() -> Native | None:
    """The compiled kernels; None where there are none. The first call of a process may compile for some seconds."""
    found = _found()
    return found if isinstance(found, Native) else None


def knowing(*tensors: Tensor) -> Native | Gpu | None:
    """The kernels that know the dtypes of these, which lie on one device."""
    first = tensors[0]
    if any(t.dtype not in DTYPES or t.device != first.device for t in tensors):
        return None
    if first.device.type == "cuda":
        return gpu()
    return native() if first.device.type == "cpu" else None


def without_gradient(*tensors: Tensor) -> Native | Gpu | None:
    """The kernels that can compute on these, where no gradient is wanted. Where one may be: `trained.layer_kernels`."""
    return None if torch.is_grad_enabled() else knowing(*tensors)


def why_not() -> str:
    """Why `native` gives None; "" when it does not."""
    found = _found()
    return str(found) if isinstance(found, Unavailable) else ""


def _load() -> Native:
    compiler, reason = building.find_compiler(), ""
    for extra in building.variants():
        try:
            library = Native(building.compiled(compiler, extra))
            expect_right(library)
            return library
        except (Unavailable, OSError) as error:
            reason = str(error)
    raise Unavailable(reason)
