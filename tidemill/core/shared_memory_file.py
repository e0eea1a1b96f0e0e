"""Anonymous shared memory: a file that other processes open by its path.

It disappears with the last process that has it open, however that process ended.
"""

from __future__ import annotations

import os


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
