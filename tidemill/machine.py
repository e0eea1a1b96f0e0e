"""What this machine has, as far as the operating system tells."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may run on, a container's quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def memory_bytes() -> tuple[int, int]:
    """(what there is, what is free) for this process, a container's limit included. Files that are cached and could be
    dropped count as free."""
    system = psutil.virtual_memory()
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < system.total:
        counts = dict(line.split() for line in _read(CGROUP / "memory.stat").splitlines())
        taken = int(used) - int(counts.get("inactive_file", 0))
        return int(limit), min(system.available, max(0, int(limit) - taken))
    return system.total, system.available


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not Linux, or an older control group: then there is no limit to know of
