"""Copies to a CUDA device from memory that is not pinned, as a mapping that another process writes to is not."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.models.piecewise import DEVICE_PIECE_BYTES


class Uploads:
    """Through two pinned rooms, which take turns. The driver would copy through such memory of its own, and keep whoever
    else tells the device what to do waiting meanwhile."""

    def __init__(self, device: torch.device) -> None:
        pins = device.type == "cuda"
        self._rooms = [torch.empty(DEVICE_PIECE_BYTES, dtype=torch.uint8, pin_memory=pins) for _ in range(2)]
        self._left = [torch.cuda.Event() if pins else None for _ in self._rooms]

    def copy(self, into: Tensor, given: Tensor) -> None:
        """given, which may change as soon as this returns, to `into`, on the current stream."""
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
