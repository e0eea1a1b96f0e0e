"""Supervisor: the process that starts a sandboxed program, watches its limits and ends all that it started.

It runs on its own, started by `supervisor_process`: of this package it has only `program_start`. Inside of namespaces it is
their first process, with which they end. With Landlock it stays outside, and each program is confined after the fork.
Requests come on stdin, results go to stdout: a length, a JSON header, and the blobs whose sizes the header's `blobs` tells.
The end of stdin is the end of everything here.
"""

import json
import os
import resource
import select
import signal
import struct
import time
from contextlib import suppress
from functools import partial

from tidemill.sandbox.program_start import LIBC, become

LENGTH = struct.Struct("<I")
TICK_S, END_S = 0.05, 20.0  # between two looks at memory, disk and processes; for killed processes to be gone
DUMPABLE, SUBREAPER = 4, 36
CHUNK = 1 << 16
BY_SIGNAL = {int(signal.SIGXCPU): "cpu_seconds", int(signal.SIGXFSZ): "disk"}
MB = 1 << 20
PAGE = resource.getpagesize()
OWN_NAMESPACE = os.getpid() == 1


class Ended(Exception):
    """The starter has closed its end, or wants nothing more."""


def main(settings) -> None:
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # programs of the same user can then not look into this process
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    write({"ready": True})
    number, forward = 0, None
    if settings["port"]:
        from tidemill.sandbox.forwarder import forked, listening  # it is there if there is an address

        forward = partial(forked, listening(settings["port"]))
    try:
        while True:
            header, blobs = read()
            number += 1
            files = dict(zip(header["files"], blobs[1:], strict=True))
            if forward is not None:
                forward()
            write(*run(settings, header, files, blobs[0], number))
            warm_up()
    except Ended:
        pass
    finally:
        end_all(settings)
        if not OWN_NAMESPACE:
            remove(settings["folder"])


def warm_up() -> None:
    """Import what programs that fail need, once it is clear that others may follow: they are forked from here."""
    import linecache  # noqa: F401
    import shutil  # noqa: F401
    import subprocess  # noqa: F401
    import traceback  # noqa: F401


def read():
    """The next request, and its blobs. Raises Ended."""
    (size,) = LENGTH.unpack(exactly(LENGTH.size))
    header = json.loads(exactly(size))
    return header, [exactly(each) for each in header["blobs"]]


def exactly(size):
    found = bytearray()
    while len(found) < size:
        chunk = os.read(0, min(size - len(found), MB))  # bounded: the starter's end closes the pipe
        if not chunk:
            raise Ended
        found += chunk
    return bytes(found)


def write(header, *blobs) -> None:
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    data = memoryview(b"".join([LENGTH.pack(len(text)), text, *blobs]))
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        raise Ended from None


# --- one program ---------------------------------------------------------------------------------------------------------


def run(settings, request, files, stdin, number):
    """Run the request's program once, in a new folder. Returns the result and its blobs, stdout and stderr."""
    limits, folder = settings["limits"], os.path.join(settings["folder"], f"work-{number}")
    os.mkdir(folder, 0o700)
    ends = [os.pipe() for _ in range(3)]
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        become(settings, request, files, folder, [ends[0][0], ends[1][1], ends[2][1]])
    for end in (ends[0][0], ends[1][1], ends[2][1], *([settings["channel"]] if settings["channel"] else [])):
        os.close(end)
    settings["channel"] = 0  # it is the first program's, whose end the other side has to see
    for end in (ends[0][1], ends[1][0], ends[2][0]):
        os.set_blocking(end, False)
    watch = ProgramWatch(limits, folder, pid)
    try:
        watch.until_end(ends[0][1], stdin, [ends[1][0], ends[2][0]], begun + limits["seconds"])
    finally:
        status, peak = end_all(settings, pid)
    seconds = time.monotonic() - begun
    watch.rest()
    for end in watch.open:
        os.close(end)
    remove(folder)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    watch.limit = watch.limit or BY_SIGNAL.get(ended_by, "")
    result = {"status": os.WEXITSTATUS(status) if not ended_by else -ended_by, "limit": watch.limit}
    result |= {"seconds": seconds, "peak": peak, "clean": clean(settings, folder)}
    return result, *map(bytes, watch.output)


def clean(settings, folder) -> bool:
    """True when another program may run here, and finds nothing of this one.

    Landlock has kept the program in its folder, but for attributes of the folder above, which are put back.
    """
    if not settings["landlock"] or os.path.lexists(folder):
        return False
    if OWN_NAMESPACE:
        above = settings["folder"]
        os.chmod(above, 0o755)
        for name in os.listxattr(above):
            os.removexattr(above, name)
        os.utime(above, (0, 0))
    return True


class ProgramWatch:
    """Feeds a program, reads what it writes, and looks after its limits until it ends."""

    def __init__(self, limits, folder, pid) -> None:
        self.limits, self.folder, self.pid = limits, folder, pid
        self.output, self.limit = (bytearray(), bytearray()), ""
        self.open = set()
        self.reading = {}

    def until_end(self, feed, stdin, read, deadline) -> None:
        """Return when the program has ended, or a limit is reached. Raises Ended."""
        handle, poll, left = os.pidfd_open(self.pid), select.epoll(), memoryview(stdin)
        self.open = {feed, handle, *read}
        self.reading = dict(zip(read, self.output, strict=True))
        for each in (0, handle, *read):
            poll.register(each, select.EPOLLIN)
        poll.register(feed, select.EPOLLOUT)
        look = time.monotonic() + TICK_S
        while not self.limit:
            now = time.monotonic()
            for end, event in poll.poll(max(0.0, min(look, deadline) - now)):
                if end == handle:
                    return
                if end == 0 and event & (select.EPOLLHUP | select.EPOLLERR):
                    raise Ended
                if end == feed:
                    left = self._fed(poll, feed, left, event)
                elif end in self.reading and not self._read(end):
                    poll.unregister(end)
            if time.monotonic() >= deadline:
                self.limit = self.limit or "seconds"
            if time.monotonic() >= look:
                self.limit, look = self.limit or exceeded(self.limits, self.folder), time.monotonic() + TICK_S

    def rest(self) -> None:
        """Read what is left in the pipes, whose writers are all gone."""
        for end in [*self.reading]:
            while self._read(end):
                pass

    def _fed(self, poll, feed, left, event):
        try:
            left = left[os.write(feed, left[:CHUNK]) :] if left else left
        except BlockingIOError:
            return left
        except OSError:
            left = left[:0]  # it reads no more
        if not left:
            poll.unregister(feed)
            self.open.discard(feed)
            os.close(feed)
        return left

    def _read(self, end) -> bool:
        """Read once; False at the end."""
        kept = self.reading[end]
        room = self.limits["output"] - len(kept)
        try:
            chunk = os.read(end, CHUNK)  # bounded: it does not block
        except BlockingIOError:
            return False
        kept += chunk[:room]
        if len(chunk) > room:
            self.limit = self.limit or "output"
            del self.reading[end]
            return False
        return bool(chunk)


def exceeded(limits, folder) -> str:
    """The limit of memory, disk or processes that is exceeded now; "" if none is."""
    found = below()
    if len(found) > limits["processes"]:
        return "processes"
    resident = sum(pages(pid) for pid in found) * PAGE
    if resident > limits["memory"] and sum(share(pid) for pid in found) > limits["memory"]:
        return "memory"
    return "disk" if full(limits, folder) else ""


def pages(pid) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return 0


def share(pid) -> int:
    """Bytes of a process, with its share of what it has in common with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
    except (OSError, ValueError):
        return pages(pid) * PAGE


def full(limits, folder) -> bool:
    if OWN_NAMESPACE:  # a file system of its own has the size; what is counted are files
        there = os.statvfs(folder)
        return there.f_files - there.f_ffree > limits["files"]
    size, count, stack = 0, 0, [folder]
    while stack and count <= limits["files"] and size <= limits["disk"]:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
        except OSError:
            continue
    return count > limits["files"] or size > limits["disk"]


def remove(folder) -> None:
    """Remove a program's folder, which may be deeper than paths are long."""
    try:
        names = os.listdir(folder)
        if not names:
            return os.rmdir(folder)
    except OSError:
        pass
    import shutil
    import subprocess  # imported late: most programs leave nothing, and a start should be short

    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["/bin/rm", "-rf", "--", folder], timeout=END_S, stderr=subprocess.DEVNULL)


# --- the end of all ------------------------------------------------------------------------------------------------------


def end_all(settings, main=0):
    """Kill every process below this one. Returns the main one's wait status and its peak of memory in bytes."""
    status, peak, deadline = 0, 0, time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            while True:
                pid, found, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == main:
                    status, peak = found, usage.ru_maxrss * 1024
        except ChildProcessError:  # orphans become children of this process, so there is nobody left
            return status, peak
        strike(settings)
        time.sleep(0.0005)
    os._exit(70)  # the starter sees the end without a result, which is no result


def strike(settings) -> None:
    if OWN_NAMESPACE:
        kill(-1)
    elif settings["user"]:
        strike_user(settings["user"])
    else:
        found = set()
        while fresh := set(below()) - found:  # stopped ones start no others
            for each in fresh:
                kill(each, signal.SIGSTOP)
            found |= fresh
        for each in found:
            kill(each)


def strike_user(user) -> None:
    """Kill all processes of a user by one call, during which none can be forked."""
    pid = os.fork()
    if not pid:
        os.setresuid(user, user, user)
        kill(-1)
        os._exit(0)
    handle = os.pidfd_open(pid)
    select.select([handle], [], [], 1.0)
    os.close(handle)
    kill(pid)  # if one of those stopped it
    os.waitpid(pid, 0)  # bounded: it was killed


def kill(pid, number=signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def below():
    """The processes that were started below this one. Orphans are children of it."""
    if OWN_NAMESPACE:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found, stack = [], [os.getpid()]
    while stack:
        parent = stack.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    stack += map(int, file.read().split())
        except OSError:
            pass
        found.append(parent)
    return found[1:]
