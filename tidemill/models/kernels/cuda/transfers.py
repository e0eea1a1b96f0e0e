"""Small arrays to a CUDA device and back, while nobody waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """In memory from which it goes to a CUDA device while nobody waits. It is kept until it has gone."""
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here.pin_memory() if device.type == "cuda" else here


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device by the time that what is launched next reads it; nothing that was launched before is waited for."""
    return pinned(array, device).to(device, non_blocking=True)


def fetched(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """(x in the host's memory, when it is there)"""
    if not x.is_cuda:
        return x, None
    into, done = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
    into.copy_(x, non_blocking=True)
    done.record()
    return into, done
