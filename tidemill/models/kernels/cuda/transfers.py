"""Asynchronous copies of small arrays to a CUDA device and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """The array in pinned memory, from which it is copied to a CUDA device asynchronously.

    The memory is kept until the copy is done.
    """
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here.pin_memory() if device.type == "cuda" else here


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, ready before any kernel that is launched next.

    It does not wait for what was launched before.
    """
    return pinned(array, device).to(device, non_blocking=True)


def fetched(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """(x in the host's memory, the event at which it is there; None if x was there already)."""
    if not x.is_cuda:
        return x, None
    into, done = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
    into.copy_(x, non_blocking=True)
    done.record()
    return into, done
