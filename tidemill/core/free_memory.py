"""Free memory of this process: one arena for all threads, and its return to the system.

By default glibc gives each thread an arena of its own, keeps what becomes free there, and can return the main one alone.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_ARENA_MAX = -8  # `M_ARENA_MAX` in malloc.h


def share_one_arena() -> None:
    """Let threads that start from now on allocate from the main arena. It has no effect without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Give free memory back to the system. It has no effect without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
