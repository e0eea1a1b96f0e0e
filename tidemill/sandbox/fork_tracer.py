"""Fork tracer: sees each process and thread of a program before it runs, so that there are never more than its limit.

It serves programs that have no user of their own: the kernel's limit of processes counts whatever else their user runs. By
ptrace(2) each new task stops before its first instruction, until this lets it go on. (A filter that asks about each fork,
seccomp_unotify(2), does not do: signals interrupt the question, and shells take that for a failed fork.) Like `supervisor`
it runs without this package.
"""

import ctypes
import os
import signal

from tidemill.sandbox.program_start import LIBC

SEIZE, GO_ON, STAY_STOPPED, MESSAGE = 0x4206, 7, 0x4208, 0x4201  # PTRACE_SEIZE, _CONT, _LISTEN, _GETEVENTMSG
NEW_TASKS, END_WITH_TRACER = 2 | 4 | 8, 1 << 20  # options: PTRACE_O_TRACEFORK, TRACEVFORK and TRACECLONE; EXITKILL
FORKED = (1, 2, 3)  # events of a task that has started another: PTRACE_EVENT_FORK, _VFORK, _CLONE
STOPPED = 128  # PTRACE_EVENT_STOP: a new task, or one of a program that was stopped
STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
ALL_TASKS = 0x40000000  # __WALL
AT_ONCE = 256  # stops that are answered in one look: a program that signals itself without end makes more and more


class ForkTracer:
    """Lets the tasks of one program start while there are few enough. Threads count as processes do."""

    def __init__(self, pid, most) -> None:
        """Trace a process. Raises OSError."""
        self.pid, self.most, self.tasks = pid, most, {pid}
        self.ended = None  # wait status and peak of memory in bytes of the process, once it has ended
        if LIBC.ptrace(SEIZE, pid, 0, NEW_TASKS | END_WITH_TRACER):
            raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}")

    def look(self) -> bool:
        """Let tasks go on that have stopped. False when there are too many: the last one has not begun."""
        for _ in range(AT_ONCE):
            try:
                task, status, usage = os.wait4(-1, os.WNOHANG | ALL_TASKS)
            except ChildProcessError:
                return True
            if not task:
                return True
            if not os.WIFSTOPPED(status):
                self.tasks.discard(task)
                if task == self.pid:
                    self.ended = status, usage.ru_maxrss * 1024
                continue
            number, event = os.WSTOPSIG(status), status >> 16
            self.tasks |= {task, started_by(task)} if event in FORKED else {task}
            if len(self.tasks) > self.most:
                self._forget()
            if len(self.tasks) > self.most:
                return False
            stays = event == STOPPED and number in STOPS
            LIBC.ptrace(STAY_STOPPED if stays else GO_ON, task, 0, 0 if event else number)
        signal.raise_signal(signal.SIGCHLD)  # others wait: they are for the next look, lest other limits be forgotten
        return True

    def _forget(self) -> None:
        """Leave out tasks that are gone: a thread that becomes another program ends the others unseen."""
        self.tasks = {task for task in self.tasks if os.path.exists(f"/proc/{task}")}


def started_by(task):
    """The task that a stopped one has just started."""
    found = ctypes.c_ulong(task)
    LIBC.ptrace(MESSAGE, task, 0, ctypes.byref(found))
    return found.value


def woken_by_tasks():
    """A descriptor that can be read from whenever a task has stopped or ended."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read
