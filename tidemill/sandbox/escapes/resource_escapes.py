"""Escapes from limits: more time, memory, disk, processes or output than a program may have."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from tidemill.sandbox.escapes.escape_tools import call, harmful

MB = 1 << 20


@harmful
def forks_without_end(stage):
    """Fork until the machine stands still, from all children too, none of which ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    count, first = 0, os.getpid()
    deadline = time.monotonic() + stage["seconds"] + 20
    while time.monotonic() < deadline:
        try:
            if not os.fork():
                os.write(write, b"x")
        except OSError:
            time.sleep(0.001)
        if os.getpid() != first:
            continue
        with suppress(OSError):
            count += len(os.read(read, 65536))
        if count > stage["processes"]:
            return count


def untraced(stage):
    """Start a process that no tracer sees, which would not be counted."""
    child = call(56, 220, 0x00800000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child > 0


@harmful
def threads_without_end(stage):
    """Start threads until the machine stands still."""
    for _ in range(4 * stage["processes"]):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return True


@harmful
def all_memory(stage):
    """Take more memory than is allowed, in one process."""
    blocks = []
    while len(blocks) * 16 < 2 * stage["memory_mb"]:
        blocks.append(b"x" * (16 * MB))
    return len(blocks)


@harmful
def memory_by_many(stage):
    """Take more memory than is allowed, in many processes that have little each."""
    for _ in range(6):
        if not os.fork():
            block = os.urandom(MB) * (stage["memory_mb"] // 2)
            time.sleep(20)
            os._exit(len(block) & 1)
    time.sleep(20)
    return True


@harmful
def all_of_the_disk(stage):
    """Write more than is allowed, in one file."""
    with open("big", "wb") as file:
        for _ in range(2 * stage["disk_mb"]):
            file.write(bytes(MB))
            file.flush()
    return True


@harmful
def disk_by_many_files(stage):
    """Write more than is allowed, in many files."""
    block = bytes(stage["disk_mb"] * MB // 4)
    for number in range(100):
        with open(f"part-{number}", "wb") as file:
            file.write(block)
    time.sleep(1)
    return True


@harmful
def files_without_end(stage):
    """Make so many empty files that the kernel has no room for more."""
    for number in range(1_000_000):
        open(f"empty-{number}", "w").close()
    return True


@harmful
def disk_by_shared_memory(stage):
    """Write more than is allowed to /dev/shm."""
    with open("/dev/shm/big", "wb") as file:
        for _ in range(256):
            file.write(bytes(MB))
    return True


@harmful
def folders_without_end(stage):
    """Make folders so deep that they can hardly be removed."""
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")
    print("held", flush=True)  # the starter looks whether they are gone
    os._exit(0)


@harmful
def flood(stage):
    """Print without end."""
    while True:
        os.write(1, b"x" * 65536)


@harmful
def flood_of_errors(stage):
    """Print to stderr without end."""
    while True:
        os.write(2, b"x" * 65536)


@harmful
def sleeper(stage):
    """Sleep far beyond the limit of time."""
    sys.stdout.flush()
    time.sleep(stage["seconds"] + 20)
    return True


@harmful
def sleeper_without_output(stage):
    """Close all descriptors and sleep."""
    os.closerange(0, 64)
    time.sleep(stage["seconds"] + 20)
    return True


@harmful
def spinner(stage):
    """Compute without end."""
    while True:
        pass


@harmful
def deaf(stage):
    """Ignore every signal that can be ignored, and go on."""
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + stage["seconds"] + 20
    while time.monotonic() < deadline:
        pass
    return True


@harmful
def stopped(stage):
    """Stop oneself, so that no limit of processor time is reached."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(stage["seconds"] + 20)


@harmful
def daemon(stage):
    """Leave a process behind, in a session of its own."""
    for _ in range(2):
        if os.fork():
            os._exit(0)
        os.setsid()
    os.execv("/bin/sh", ["sh", "-c", "sleep 60 ; : " + stage["daemon"]])


@harmful
def daemon_that_forks(stage):
    """Leave processes behind that fork and end all the time."""
    if os.fork():
        os._exit(0)
    os.setsid()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if os.fork():
            os._exit(0)
        with open("/proc/self/comm", "w") as file:
            file.write(stage["daemon"][:15])
