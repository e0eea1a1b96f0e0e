"""Host memory of exact size, pinned for a CUDA device, and the return of memory that became free.

PyTorch's own pinned memory comes in powers of two, so that up to half of it is never used.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tidemill.core.memory import return_free_memory

_ALIGN = 64


class Pinned:
    """Pins a mapping's pages, which CUDA copies faster; `held`: it did not refuse."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._cuda: Any = torch.cuda.cudart()  # it raises where there is none
        self.held = int(self._cuda.cudaHostRegister(self._address, len(mapping), 0)) == 0

    def close(self) -> None:
        if self.held:
            self._cuda.cudaHostUnregister(self._address)
            self.held = False


class _Block(mmap.mmap):
    """Anonymous memory. It goes back to the system, unpinned, with the last tensor in it."""

    pinned: Pinned | None = None

    def __del__(self) -> None:
        if self.pinned is not None:
            self.pinned.close()


def host_tensors(likes: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Zeros of these shapes and dtypes, in one block of host memory that is pinned if `device` copies faster then."""
    starts, end = list[int](), 0
    for like in likes:
        starts.append(end)
        end = -(-(end + like.numel() * like.element_size()) // _ALIGN) * _ALIGN
    block = _Block(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if device.type == "cuda":
        block.pinned = Pinned(block)
    return [_view(block, start, like) for start, like in zip(starts, likes, strict=True)]


def _view(block: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.frombuffer(block, dtype=like.dtype, offset=start, count=like.numel()).view(like.shape)


class MovedToHost:
    """The memory of some tensors, moved to the host and back. The tensors stay the same objects."""

    def __init__(self) -> None:
        self._room: list[Tensor] = []  # host memory, kept for the next time
        self._away: list[torch.UntypedStorage] = []

    def move(self, tensors: Sequence[Tensor]) -> None:
        """Free the memory of these tensors on their device. They must not be used until `back`.

        Does nothing if they are on the host.
        """
        if self._away:
            return
        away = list({storage.data_ptr(): storage for t in tensors if (storage := t.untyped_storage()).nbytes()}.values())
        if not away:
            return
        if [place.nbytes for place in self._room] != [storage.nbytes() for storage in away]:
            sizes = [torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta") for storage in away]
            self._room = host_tensors(sizes, away[0].device)
        for place, storage in zip(self._room, away, strict=True):
            place.copy_(_bytes(storage))
            storage.resize_(0)
        self._away = away

    def back(self) -> None:
        """Bring the tensors back to their device; does nothing if they are there."""
        for place, storage in zip(self._room, self._away):  # noqa: B905  (the room may be of an earlier time)
            storage.resize_(place.nbytes)
            _bytes(storage).copy_(place, non_blocking=True)
        self._away = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def give_back(device: torch.device) -> None:
    """Give memory that became free back to the device and to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_free_memory()
