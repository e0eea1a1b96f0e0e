"""Landlock: which files a program may reach, without root and without namespaces (Linux 5.13 and newer).

Paths that no rule names cannot be read, written or executed. What Landlock leaves alone is refused by the seccomp filter, or
by the user id: `stat` of any path works, and so does a look at the names of processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

CREATE_RULESET, VERSION = 444, 1
FILES_SINCE = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}  # ABI -> the file rights that it knows
EXECUTE, READ_FILE, READ_FOLDER, DEVICES = 0x1, 0x4, 0x8, 0x40 | 0x800  # devices: making them
OF_FILES = 0x1 | 0x2 | 0x4 | 0x4000 | 0x8000  # rights that a rule of a single file may give
TCP, SCOPES = 0x3, 0x3  # bind and connect (ABI 4); abstract UNIX sockets and signals (ABI 6)
DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
SIGNALS_SINCE, TCP_SINCE, TRUNCATION_SINCE = 6, 4, 3


@cache
def abi() -> int:
    """The kernel's version of Landlock; 0 where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
        found = int(call(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))
    except (AttributeError, OSError):
        return 0
    return max(found, 0)


def lacking(root: bool) -> str:
    """The reason why this kernel's Landlock does not isolate enough; "" if it does. root: programs get other users."""
    if not abi():
        return "this kernel has no Landlock, or was started without it"
    if not root and abi() < TRUNCATION_SINCE:
        return f"this kernel's Landlock has version {abi()}, and without root {TRUNCATION_SINCE} is needed (Linux 6.2)"
    return ""


def ruleset(readable: Iterable[str], network: bool = False) -> dict[str, Any]:
    """The rules as the supervisor takes them; it adds the program's folder, in which all rights but devices hold.

    network: the program has a network of its own, and may use it.
    """
    version = abi()
    files = next(rights for since, rights in sorted(FILES_SINCE.items(), reverse=True) if version >= since)
    looked = EXECUTE | READ_FILE | READ_FOLDER
    return {
        "handled": [
            files,
            *([0 if network else TCP] if version >= 4 else []),
            *([SCOPES] if version >= SIGNALS_SINCE else []),
        ],
        "rules": [*([path, looked] for path in readable), *([path, READ_FILE | 0x2] for path in DEVICE_FILES)],
        "folder": files & ~DEVICES,
        "of_files": OF_FILES & files,
    }
