"""Limits of this machine and container: cores, memory and open files."""

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
    """The number of cores that this process may run on, within its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(""):
        allowed = _within(allowed, *_read(group / "cpu.max").partition(" ")[::2])
    for name in _CPU:
        for group in _groups("cpu", name):
            allowed = _within(allowed, _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
    return allowed


def allow_files(needed: int) -> int:
    """Raise this process's limit of open files to `needed` if it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return needed if soft == resource.RLIM_INFINITY else soft


def memory_bytes() -> tuple[int, int]:
    """(total, free) bytes for this process, within its container's limit; cached files count as free."""
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

    controller: a version 1 controller, mounted apart; "" is version 2. A container may see only the mounted root.
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
