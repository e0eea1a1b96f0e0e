"""Copies to a CUDA device from memory that is not pinned, such as a shared mapping."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.models.piecewise import DEVICE_PIECE_BYTES


class Uploads:
    """Copies through two pinned buffers, which take turns.

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
