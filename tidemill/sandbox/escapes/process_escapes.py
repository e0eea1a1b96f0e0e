"""Escapes to other processes: their environment, memory, descriptors, limits and lives."""

import ctypes
import os
import resource
import signal
import struct
import time

from tidemill.sandbox.escapes.escape_tools import LIBC, call, read

SEIZE, DETACH = 0x4206, 17


def starters_environment(stage):
    """Read the environment of the process that started the sandbox."""
    return len(read(f"/proc/{stage['starter']}/environ"))


def first_process_environment(stage):
    """Read the environment of process 1, which `bwrap` may have been given."""
    variables = [each for each in read("/proc/1/environ").split(b"\0") if each]
    return [each for each in variables if not each.startswith((b"PYTHONHASHSEED=", b"PWD="))]


def every_environment(stage):
    """Look for a secret in the environments of all processes that can be seen."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if stage["secret"].encode() in read(f"/proc/{name}/environ"):
                return name
        except OSError:
            continue


def command_lines(stage):
    """Look for a secret in the command lines of all processes that can be seen."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if stage["secret"].encode() in read(f"/proc/{name}/cmdline"):
                return name
        except OSError:
            continue


def trace_victim(stage):
    """Trace another process."""
    seized = call(101, 117, SEIZE, stage["victim"], 0, 0)
    if seized == 0:
        call(101, 117, DETACH, stage["victim"], 0, 0)
    return seized == 0


def trace_own_child(stage):
    """Trace a child: ptrace has helped to get around filters of system calls."""
    child = os.fork()
    if not child:
        time.sleep(5)
        os._exit(0)
    seized = call(101, 117, SEIZE, child, 0, 0)
    os.kill(child, signal.SIGKILL)
    return seized == 0


def trace_supervisor(stage):
    """Trace the process above this one, or the first one."""
    return 0 in (call(101, 117, SEIZE, each, 0, 0) for each in {os.getppid(), 1})


def _vectors(address, size):
    buffer = ctypes.create_string_buffer(size)
    local = struct.pack("QQ", ctypes.addressof(buffer), size)
    return buffer, local, struct.pack("QQ", address, size)


def read_memory(stage):
    """Read another process's memory by process_vm_readv."""
    buffer, local, remote = _vectors(stage["address"], len(stage["secret"]))
    call(310, 270, stage["victim"], local, 1, remote, 1, 0)
    return buffer.raw.decode(errors="replace") == stage["secret"]


def write_memory(stage):
    """Write another process's memory by process_vm_writev."""
    _, local, remote = _vectors(stage["address"] + len(stage["secret"]) + 1, 1)
    return call(311, 271, stage["victim"], local, 1, remote, 1, 0) > 0


def memory_file(stage):
    """Read another process's memory by its file."""
    with open(f"/proc/{stage['victim']}/mem", "rb", buffering=0) as file:
        file.seek(stage["address"])
        return file.read(len(stage["secret"])).decode(errors="replace") == stage["secret"]


def supervisors_memory(stage):
    """Write the memory of the process above this one, which reports the result."""
    with open(f"/proc/{os.getppid()}/mem", "r+b", buffering=0):
        return True


def supervisors_descriptors(stage):
    """Open the pipes of the process above this one, to write a result of one's own."""
    return os.listdir(f"/proc/{os.getppid()}/fd")


def copied_descriptor(stage):
    """Copy a descriptor of another process by pidfd_getfd."""
    handle = os.pidfd_open(stage["victim"])
    return call(438, 438, handle, 1, 0) >= 0


def victims_root(stage):
    """Reach the machine's files by the root folder of another process."""
    return stage["secret"].encode() in read(f"/proc/{stage['victim']}/root{stage['file']}")


def signal_victim(stage):
    """End a process outside."""
    os.kill(stage["victim"], signal.SIGKILL)
    return True


def signal_everybody(stage):
    """Signal every process that has a number near the outside ones."""
    for pid in range(max(2, stage["victim"] - 50), stage["victim"] + 1):
        try:
            if pid not in (os.getpid(), os.getppid()) and pid == stage["victim"]:
                os.kill(pid, signal.SIGCONT)
                return pid
        except OSError:
            continue


def end_supervisor(stage):
    """End the process above this one, so that no limit holds any more."""
    above = os.getppid()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT):
        try:
            os.kill(above, number)
        except OSError:
            continue
    time.sleep(0.2)
    return os.getppid() != above


def stop_supervisor(stage):
    """Stop the process above this one: nobody would watch, and the starter would wait."""
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(0.2)
    return b"State:\tT" in read(f"/proc/{os.getppid()}/status")


def supervisors_limits(stage):
    """Give the process above this one a limit that ends it."""
    return call(302, 261, os.getppid(), resource.RLIMIT_NOFILE, struct.pack("QQ", 4096, 4096), 0) == 0


def victims_cores(stage):
    """Move another process to one core."""
    os.sched_setaffinity(stage["victim"], os.sched_getaffinity(0))
    return True


def victims_priority(stage):
    """Change another process's priority."""
    os.setpriority(os.PRIO_PROCESS, stage["victim"], os.getpriority(os.PRIO_PROCESS, 0))
    return True


def key_ring(stage):
    """Add a key to the kernel's key rings, where others can find it."""
    return call(248, 217, b"user", b"tidemill-escape", b"x", 1, -2) > 0


def session_keys(stage):
    """Read the session's key ring."""
    return call(250, 219, 0, -3, 1, 0, 0) > 0


def shared_memory_segment(stage):
    """Read a System V segment of shared memory that belongs to others."""
    LIBC.shmat.restype = ctypes.c_void_p
    address = LIBC.shmat(stage["segment"], None, 0o10000)
    return address not in (None, ctypes.c_void_p(-1).value) and stage["secret"].encode() in ctypes.string_at(address, 64)


def message_queue(stage):
    """Open a POSIX message queue of others."""
    return call(240, 180, stage["queue"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, 0) >= 0


def raised_limits(stage):
    """Raise the limits of memory, files, processes and core dumps."""
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_AS)
    for what in (resource.RLIMIT_CORE, *limits):
        try:
            hard = resource.getrlimit(what)[1]
            more = resource.RLIM_INFINITY if what != resource.RLIMIT_NOFILE else hard + 1
            if hard != resource.RLIM_INFINITY or what == resource.RLIMIT_CORE:
                resource.setrlimit(what, (more, more))
                return what
        except (OSError, ValueError):
            continue


def raised_priority(stage):
    """Take a higher priority than others."""
    os.nice(-1)
    return True


def real_time(stage):
    """Take a real-time schedule, which others cannot interrupt."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return True


def inherited_descriptors(stage):
    """Use a descriptor that the starter left open."""
    for number in range(3, 256):
        try:
            os.fstat(number)
            return number
        except OSError:
            continue


def root_again(stage):
    """Become root, and join its groups."""
    for change in (lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setresgid(0, 0, 0)):
        try:
            change()
            return stage["root"]  # within a user namespace 0 could be anybody
        except OSError:
            continue


def new_privileges(stage):
    """Run a set-user-id program with its owner's rights."""
    return LIBC.prctl(39, 0, 0, 0, 0) == 0


def terminal_input(stage):
    """Type into the terminal of the one who started the sandbox (TIOCSTI)."""
    import fcntl
    import pty

    _, terminal = pty.openpty() if not os.path.exists("/dev/tty") else (0, os.open("/dev/tty", os.O_RDWR))
    fcntl.ioctl(terminal, 0x5412, b"\n")
    return True
