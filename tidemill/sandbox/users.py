"""Users of sandboxed programs: where this process is root, each sandbox gets a user id of its own.

Root is bound by no limit of processes and owns most files, so no program may run as root. With ids of their own programs
cannot signal each other, and what one has started is found by its id.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tidemill.core.errors import ConfigError

FIRST, LAST = 64000, 64999  # below 65536, which is all that some containers have; no distribution gives these out
NOBODY = 65534  # the id that a program sees within a user namespace


@contextmanager
def claimed_user() -> Iterator[int]:
    """A user id that no other sandbox of this machine has now; 0 where this process is not root.

    The claim is the name of a UNIX socket in memory, which the kernel takes back when this process ends.
    """
    if os.getuid() != 0:
        yield 0
        return
    with ExitStack() as stack:
        claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        yield _claim(claim)


def _claim(claim: socket.socket) -> int:
    for user in range(FIRST, LAST + 1):
        try:
            claim.bind(f"\0tidemill-sandbox-user-{user}")
            return user
        except OSError:
            continue
    raise ConfigError(f"all user ids from {FIRST} to {LAST} are in use by sandboxes: end other runs of this machine")


def reachable(path: str, user: int) -> bool:
    """True when a user without groups can read and run a file, or list a folder. user 0: this process's own."""
    if not user:
        return os.access(path, os.R_OK | os.X_OK)
    real = Path(os.path.realpath(path))
    try:
        folders = [parent.stat().st_mode for parent in real.parents]
        wanted = stat.S_IROTH | stat.S_IXOTH
        return all(mode & stat.S_IXOTH for mode in folders) and real.stat().st_mode & wanted == wanted
    except OSError:
        return False
