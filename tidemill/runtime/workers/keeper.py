"""The two processes above a worker that outlive whatever it starts.

    python -m tidemill.runtime.workers.keeper MODULE MEMORY_MB PARENT

    who starts it -> outer keeper -> inner keeper -> the worker (MODULE) -> whatever the user's code starts

Linux gives the orphans below a process back to it if it asks (PR_SET_CHILD_SUBREAPER). So whoever leaves its parent, its
session and its environment behind comes to the inner keeper, which kills all that is below it when the worker ends, and
when who started it does. Either keeper does so when the other is killed. Elsewhere there are no keepers: this process
becomes the worker. The worker's process id is the first thing on its stdout.
"""

import ctypes
import os
import resource
import runpy
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import NoReturn

PID = struct.Struct("<I")
NAME = b"tidemill-keeper"  # as /proc/PID/comm shows it: 15 bytes are what there is room for
KEEPERS = sys.platform == "linux"
UNKEPT = "a program that a reward or an environment starts in a session of its own can outlive the run on this system"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_HEARD = {signal.SIGCHLD, signal.SIGTERM}
_LIMIT_S = 30.0  # for what was killed to be gone: the kernel may hold on to a process
_LOOK_S = 0.005


def main(module: str, memory_mb: str, parent: str) -> None:
    if KEEPERS:
        keep(int(parent))
    from tidemill.runtime.workers import worker_setup  # in the worker alone: a keeper stays small

    worker_setup.kept = KEEPERS
    os.write(1, PID.pack(os.getpid()))
    sys.argv = [module, memory_mb, parent]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def keep(parent: int) -> None:
    """Returns in the worker alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _become(NAME, signal.SIGTERM, parent)
    outer = os.getpid()
    if child := os.fork():
        _watch(child)
    os.setsid()  # what is sent to the worker's group is not for its keepers
    _become(NAME, signal.SIGTERM, outer)
    inner = os.getpid()
    if child := os.fork():
        _watch(child)
    os.setsid()
    _become(b"python", signal.SIGKILL, inner)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def _become(name: bytes, when: int, parent: int) -> None:
    """Take a name, take orphans in, and be sent the signal `when` the parent ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, name)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, when)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _watch(child: int) -> NoReturn:
    """Until the child ends, or this keeper is told to end. Then nothing below it stays."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    told, how = False, None
    while not told and (how := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        heard = signal.sigtimedwait(_HEARD, 3600.0)
        told = heard is not None and heard.si_signo == signal.SIGTERM
    end_all()
    if how is not None and how.si_code == os.CLD_EXITED:
        os._exit(how.si_status)
    number = signal.SIGTERM if how is None else how.si_status  # end as it ended
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def end_all() -> None:
    """Kill this process's children until there are none: those that they leave become its own."""
    deadline, before = time.monotonic() + _LIMIT_S, set[int]()
    while time.monotonic() < deadline:
        children = _children()
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if children <= before:
            time.sleep(_LOOK_S)
        before = children


def _children() -> set[int]:
    """Those that there are now. No number of them can become another process's: this process has not waited for it."""
    me = os.getpid()
    with suppress(OSError), open(f"/proc/{me}/task/{me}/children") as file:
        return set(map(int, file.read().split()))
    found = set[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):  # a kernel without that file
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == me:
                found.add(int(name))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
