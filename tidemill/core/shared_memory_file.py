"""Memory that other processes of this machine open by a name, and that is gone with the last of them, however that ended."""

from __future__ import annotations

import os


def anonymous_memory(name: str) -> tuple[int, str] | None:
    """(descriptor, location) of a new memory file, empty; None where this system has none that others can open (Linux has:
    it is reached by way of /proc while this process lives). name: for people who look at /proc."""
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
