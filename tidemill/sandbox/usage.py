"""Usage of a sandboxed program: its processes, memory and files, as the supervisor looks at them.

Like `supervisor` it runs without this package.
"""

import os
import resource
from contextlib import suppress

PAGE = resource.getpagesize()
OWN_NAMESPACE = os.getpid() == 1


def exceeded(limits, folder) -> str:
    """The limit of memory, disk or processes that is exceeded now; "" if none is."""
    found = below()
    if len(found) > limits["processes"]:
        return "processes"
    resident = sum(pages(pid) for pid in found) * PAGE
    if resident > limits["memory"] and sum(share(pid) for pid in found) > limits["memory"]:
        return "memory"
    return "disk" if full(limits, folder) else ""


def pages(pid) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return 0


def share(pid) -> int:
    """Bytes of a process, with its share of what it has in common with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
    except (OSError, ValueError):
        return pages(pid) * PAGE


def full(limits, folder) -> bool:
    if OWN_NAMESPACE:  # a file system of its own has the size; what is counted are files
        there = os.statvfs(folder)
        return there.f_files - there.f_ffree > limits["files"]
    size, count, stack = 0, 0, [folder]
    while stack and count <= limits["files"] and size <= limits["disk"]:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
        except OSError:
            continue
    return count > limits["files"] or size > limits["disk"]


def below():
    """The processes that were started below this one. Orphans are children of it."""
    if OWN_NAMESPACE:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found, stack = [], [os.getpid()]
    while stack:
        parent = stack.pop()
        for task in tasks_of(parent):
            with suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
                stack += map(int, file.read().split())
        found.append(parent)
    return found[1:]


def tasks_of(process):
    """The ids of a process' threads; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return []
