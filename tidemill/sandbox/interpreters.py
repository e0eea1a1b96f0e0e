"""The interpreter that runs in a sandbox, and the folders that it needs."""

from __future__ import annotations

import os
import shutil
import sys

from tidemill.core.errors import ConfigError
from tidemill.sandbox.users import reachable

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
PATH = "/usr/local/bin:/usr/bin:/bin"


def interpreter(given: str, user: int) -> str:
    """Path of the Python that programs run in; `given`, or this process's, or else the system's.

    user: the one that programs have, 0 for this process's own. Raises ConfigError when none can be reached.
    """
    if given:
        if not reachable(given, user):
            who = f"user {user}, which programs have because this process is root" if user else "this user"
            raise ConfigError(f"sandbox python = {given!r} cannot be read and run by {who}: give another one")
        return os.path.realpath(given)
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)
    candidates = [own, *(shutil.which(name, path=PATH) for name in ("python3", "python"))]
    for path in candidates:
        if path and reachable(path, user) and reachable(prefix(path), user):
            return os.path.realpath(path)
    raise ConfigError(
        f"the interpreter {own} lies where programs in the sandbox, which have another user than root, cannot reach it, and "
        "the system has none: install python3, or start as another user than root, or set sandbox python"
    )


def prefix(python: str) -> str:
    """The folder below which an interpreter has its library."""
    return os.path.dirname(os.path.dirname(os.path.realpath(python)))


def readable_paths(python: str, further: tuple[str, ...]) -> list[str]:
    """Files and folders that programs can read: the system's, the interpreter's, and further ones."""
    paths = [*SYSTEM, *SYSTEM_FILES, prefix(python), *further]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]
