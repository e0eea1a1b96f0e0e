"""Parts that the programs of the escape suite share. It runs inside of a sandbox, and imports nothing of this package.

An attempt is a function of the stage (see `stage`). It returns something true when it reached what it should not.
"""

import ctypes
import errno
import json
import os
import platform
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() in ("aarch64", "arm64")
MARK = "ESCAPED"
HARMFUL = set()  # names of attempts that are never made without a sandbox


def harmful(attempt):
    """Mark an attempt that is never made without a sandbox: it would hurt, or not end."""
    HARMFUL.add(attempt.__name__)
    return attempt


def call(x86_64, arm64, *args):
    """A system call by its number. Returns its result, or minus the error's number."""
    number = arm64 if ARM else x86_64
    given = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    LIBC.syscall.restype = ctypes.c_long
    result = LIBC.syscall(ctypes.c_long(number), *given)
    return -ctypes.get_errno() if result == -1 else result


def reached(result):
    """True when a call that fails anyway was looked at by more than a check of rights."""
    return result >= 0 or -result not in (errno.EPERM, errno.ENOSYS, errno.EACCES)


def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 20)


def ended_well(become):
    """Fork a child that becomes another program. Returns whether that ended with status 0."""
    pid = os.fork()
    if not pid:
        try:
            become()
        finally:
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def attempt(function):
    """Make an attempt in the stage that stdin tells, and say what came of it."""
    stage = json.load(sys.stdin)
    try:
        found = function(stage)
    except (OSError, ValueError, AttributeError, MemoryError, RuntimeError) as error:
        print("held:", repr(error)[:200], flush=True)
        os._exit(0)
    print(f"{MARK} {found!r:.200}" if found else "held", flush=True)
    os._exit(0)
