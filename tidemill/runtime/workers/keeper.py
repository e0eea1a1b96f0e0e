"""Keepers: two processes above each worker that kill everything it started when it ends.

    python -m tidemill.runtime.workers.keeper MODULE MEMORY_MB PARENT

    starter -> outer keeper -> inner keeper -> the worker (MODULE) -> whatever the user's code starts

Linux hands orphans to the nearest ancestor that asks for them (PR_SET_CHILD_SUBREAPER). So a process that leaves its parent,
its session and its environment becomes a child of the inner keeper. A keeper kills everything below it when the worker or
the starter ends; each does so also when the other keeper is killed. Other systems have no keepers: this process becomes the
worker. The worker's process id is the first thing on its stdout.
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
NAME = b"tidemill-keeper"  # as /proc/PID/comm shows it, which has room for 15 bytes
KEEPERS = sys.platform == "linux"
UNKEPT = "a program that a reward or an environment starts in a session of its own can outlive the run on this system"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_HEARD = {signal.SIGCHLD, signal.SIGTERM}
_LIMIT_S = 30.0  # limit for killed processes to be gone: the kernel may hold on to one
_LOOK_S = 0.005


def main(module: str, memory_mb: str, parent: str) -> None:
    if KEEPERS:
        keep(int(parent))
    os.write(1, PID.pack(os.getpid()))
    sys.argv = [module, memory_mb, parent]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def keep(parent: int) -> None:
    """Become the two keepers and the worker. Returns in the worker only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _become(NAME, signal.SIGTERM, parent)
    outer = os.getpid()
    if child := os.fork():
        _watch(child)
    os.setsid()  # signals to the worker's group must not reach its keepers
    _become(NAME, signal.SIGTERM, outer)
    inner = os.getpid()
    if child := os.fork():
        _watch(child)
    os.setsid()
    _become(b"python", signal.SIGKILL, inner)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def die_with_parent(number: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when the thread that started it ends; False where it cannot."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number) == 0


def _become(name: bytes, when: int, parent: int) -> None:
    """Take a name, adopt orphans, and have the signal `when` sent here at the parent's end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, name)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(when)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _watch(child: int) -> NoReturn:
    """Wait until the child ends or this keeper is told to end; then kill everything below and exit."""
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
    number = signal.SIGTERM if how is None else how.si_status  # end as the child ended
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def end_all() -> None:
    """Kill this process's children until there are none: it adopts the orphans they leave."""
    deadline, before = time.monotonic() + _LIMIT_S, set[int]()
    while time.monotonic() < deadline:
        children = children_now()
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


def children_now() -> set[int]:
    """Process ids of the present children. None can be reused: this process has not waited for them."""
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
