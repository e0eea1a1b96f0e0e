"""What this machine has, as far as the operating system tells."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
_CPU = ("cpu,cpuacct", "cpu", "cpuacct,cpu")  # the names that version 1 mounts its controller under


def usable_cores() -> int:
    """Cores that this process may run on, a container's quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(""):
        allowed = _within(allowed, *_read(group / "cpu.max").partition(" ")[::2])
    for name in _CPU:
        for group in _groups("cpu", name):
            allowed = _within(allowed, _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
    return allowed


def allow_files(needed: int) -> int:
    """How many files this process may have open, once its own limit is raised as far as it needs and may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return needed if soft == resource.RLIM_INFINITY else soft


def memory_bytes() -> tuple[int, int]:
    """(what there is, what is free) for this process, a container's limit included. Files that are cached and could be
    dropped count as free."""
    system = psutil.virtual_memory()
    total, free = system.total, system.available
    groups = [(group, "memory.max", "memory.current", "inactive_file") for group in _groups("")]
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    groups += [(group, *older) for group in _groups("memory", "memory")]
    for group, limit_file, used_file, cached in groups:  # every group above limits as well
        limit, used = _read(group / limit_file), _read(group / used_file)
        if limit.isdigit() and used.isdigit() and int(limit) < system.total:
            counts = dict(line.split() for line in _read(group / "memory.stat").splitlines() if line.count(" ") == 1)
            taken = int(used) - int(counts.get(cached, 0))
            total, free = min(total, int(limit)), min(free, max(0, int(limit) - taken))
    return total, free


def _groups(controller: str, mounted: str = "") -> Iterator[Path]:
    """The folders of this process's control group and of those above it, innermost first.

    controller: of version 1, mounted in a folder of its own; empty: version 2. Within a container the path may be that of
    the host, of which only the mounted root is there.
    """
    root = CGROUP / mounted
    for line in _read(OWN_GROUP).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") and path.startswith("/") and ".." not in path:
            own = PurePosixPath(path)
            yield from (root / str(each).lstrip("/") for each in (own, *own.parents) if str(each) != "/")
            break
    yield root


def _within(allowed: int, quota: str, period: str) -> int:
    if quota.isdigit() and period.isdigit() and int(period):
        return min(allowed, max(1, int(quota) // int(period)))
    return allowed


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not Linux, or no such group: then there is no limit to know of
