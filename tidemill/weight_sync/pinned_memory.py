"""Shared memory that a CUDA device writes to by itself: else its driver copies through memory of its own, more slowly."""

from __future__ import annotations

import mmap
from types import ModuleType

import torch


class Pinned:
    """Keeps a mapping's pages where they are until it is closed. Where that is not to be had, nothing changes."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._held = int(_runtime().cudaHostRegister(self._memory.data_ptr(), len(mapping), 0)) == 0

    @property
    def held(self) -> bool:
        return self._held

    def close(self) -> None:
        if self._held:
            _runtime().cudaHostUnregister(self._memory.data_ptr())
            self._held = False


def _runtime() -> ModuleType:
    found = torch.cuda.cudart()
    assert found is not None  # it raises where there is none
    return found
