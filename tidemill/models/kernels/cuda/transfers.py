"""Copies to a CUDA device and back that do not block those who give it work."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidemill.models.piecewise import DEVICE_PIECE_BYTES


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """The array in pinned memory, which is kept until copies from it are done."""
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here.pin_memory() if device.type == "cuda" else here


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device before the next kernel, not waiting for earlier ones."""
    return pinned(array, device).to(device, non_blocking=True)


def fetched(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """(x in the host's memory, the event at which it is there; None if x was there already)."""
    if not x.is_cuda:
        return x, None
    into, done = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
    into.copy_(x, non_blocking=True)
    done.record()
    return into, done


class Uploads:
    """Copies from memory that is not pinned, through two pinned buffers in turn.

    The driver would copy through such a buffer of its own, and meanwhile block everyone else who gives the device work.
    """

    def __init__(self, device: torch.device) -> None:
        pins = device.type == "cuda"
        self._rooms = [torch.empty(DEVICE_PIECE_BYTES, dtype=torch.uint8, pin_memory=pins) for _ in range(2)]
        self._left = [torch.cuda.Event() if pins else None for _ in self._rooms]

    def copy(self, into: Tensor, given: Tensor) -> None:
        """Copy `given` to `into` on the current stream. `given` may change as soon as this returns."""
        if not given.is_cpu or given.nbytes > DEVICE_PIECE_BYTES:
            into.copy_(given)
            return
        self._rooms.reverse()
        self._left.reverse()
        room, left = self._rooms[0], self._left[0]
        if left is not None:
            left.synchronize()  # bounded: by the copy before the last
        staged = room[: given.nbytes].view(given.dtype).view(given.shape)
        staged.copy_(given)
        into.copy_(staged, non_blocking=True)
        if left is not None:
            left.record()
