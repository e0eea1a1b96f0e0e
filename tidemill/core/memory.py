"""Memory beyond malloc's defaults: one arena for all threads, its return to the system, shared files.

By default glibc gives each thread an arena of its own, keeps what becomes free there, and can return the main one alone.
Anonymous shared memory is a file that other processes open by its path. It disappears with the last process that has it
open, however that process ended.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress


def anonymous_memory(name: str) -> tuple[int, str] | None:
    """(descriptor, path) of a new memory file; None where the system has none. name: its label in /proc."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create(name)
    location = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        os.close(os.open(location, os.O_RDONLY))
    except OSError:  # no /proc, or one that hides it
        os.close(fd)
        return None
    return fd, location


_ARENA_MAX = -8  # `M_ARENA_MAX` in malloc.h


def share_one_arena() -> None:
    """Let threads that start from now on allocate from the main arena. It has no effect without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Give free memory back to the system. It has no effect without glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
