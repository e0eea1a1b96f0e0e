"""Supervisor: the process that starts a sandboxed program, watches its limits and ends all that it started.

It runs on its own, started by `supervisor_process`: of this package it has only what it imports here. Inside of namespaces
it is their first process, with which they end. With Landlock it stays outside, and each program is confined after the fork.
Requests come on stdin, results go to stdout: a length, a JSON header, and the blobs whose sizes the header's `blobs` tells.
The end of stdin is the end of everything here.
"""

import json
import os
import select
import signal
import struct
import time
from _socket import AF_UNIX, MSG_DONTWAIT, SOCK_SEQPACKET, socketpair
from contextlib import suppress
from functools import partial

from tidemill.sandbox.fork_tracer import ForkTracer, woken_by_tasks
from tidemill.sandbox.program_start import CONFINED, LIBC, MOST_SAID, become
from tidemill.sandbox.usage import OWN_NAMESPACE, below, exceeded

LENGTH = struct.Struct("<I")
TICK_S, END_S = 0.05, 20.0  # between two looks at memory, disk and processes; for killed processes to be gone
DUMPABLE, SUBREAPER = 4, 36
CHUNK = 1 << 16
BY_SIGNAL = {int(signal.SIGXCPU): "cpu_seconds", int(signal.SIGXFSZ): "disk"}
MB = 1 << 20


class Ended(Exception):
    """The starter has closed its end, or wants nothing more."""


def main(settings) -> None:
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # programs of the same user can then not look into this process
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    settings["wake"] = woken_by_tasks() if settings["traced"] else None
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
    link, its_end = socketpair(AF_UNIX, SOCK_SEQPACKET)
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        become(settings, request, files, folder, [ends[0][0], ends[1][1], ends[2][1]], its_end)
    its_end.close()
    for end in (ends[0][0], ends[1][1], ends[2][1], *([settings["channel"]] if settings["channel"] else [])):
        os.close(end)
    settings["channel"] = 0  # it is the first program's, whose end the other side has to see
    for end in (ends[0][1], ends[1][0], ends[2][0]):
        os.set_blocking(end, False)
    watch = ProgramWatch(settings, folder, pid, link)
    try:
        watch.until_end(ends[0][1], stdin, [ends[1][0], ends[2][0]], begun + limits["seconds"])
    finally:
        status, peak = end_all(settings, pid)
    if watch.tracer and watch.tracer.ended:
        status, peak = watch.tracer.ended
    seconds = time.monotonic() - begun
    watch.rest()
    watch.close()
    remove(folder)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    watch.limit = watch.limit or BY_SIGNAL.get(ended_by, "")
    result = {"status": os.WEXITSTATUS(status) if not ended_by else -ended_by, "limit": watch.limit}
    result |= {"seconds": seconds, "peak": peak, "clean": clean(settings, folder), "unconfined": watch.unconfined}
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

    def __init__(self, settings, folder, pid, link) -> None:
        self.limits, self.wake = settings["limits"], settings["wake"]
        self.folder, self.pid, self.link = folder, pid, link
        self.output, self.limit = (bytearray(), bytearray()), ""
        self.said, self.tracer = b"", None
        self.open = set()
        self.reading = {}

    def until_end(self, feed, stdin, read, deadline) -> None:
        """Return when the program has ended, or a limit is reached. Raises Ended."""
        handle, poll, left = os.pidfd_open(self.pid), select.epoll(), memoryview(stdin)
        self.open = {feed, handle, *read}
        self.reading = dict(zip(read, self.output, strict=True))
        for each in (0, handle, self.link.fileno(), *read, *([self.wake] if self.wake is not None else [])):
            poll.register(each, select.EPOLLIN)
        poll.register(feed, select.EPOLLOUT)
        look = time.monotonic() + TICK_S
        while not self.limit and self.said in (b"", CONFINED):
            now = time.monotonic()
            for end, event in poll.poll(max(0.0, min(look, deadline) - now)):
                if end == handle:
                    return
                if end == 0 and event & (select.EPOLLHUP | select.EPOLLERR):
                    raise Ended
                if end == self.wake and not self._tasks_go_on():
                    self.limit = "processes"
                elif end == self.link.fileno():
                    self._begun()
                    poll.unregister(end)
                elif end == feed:
                    left = self._fed(poll, feed, left, event)
                elif end in self.reading and not self._read(end):
                    poll.unregister(end)
            if time.monotonic() >= deadline:
                self.limit = self.limit or "seconds"
            if time.monotonic() >= look:
                self.limit, look = self.limit or exceeded(self.limits, self.folder), time.monotonic() + TICK_S

    @property
    def unconfined(self) -> str:
        """The reason why there was no confined program; "" if there was one, or a limit ended it before."""
        if self.said == CONFINED or self.limit:
            return ""
        return self.said.decode(errors="replace") or "it was killed before"

    def _begun(self) -> None:
        """Hear that the program is confined, or why it is not, and let it begin."""
        with suppress(OSError):
            self.said = self.link.recv(MOST_SAID, MSG_DONTWAIT)
        if self.wake is not None and self.said == CONFINED:
            try:
                self.tracer = ForkTracer(self.pid, self.limits["processes"])
                self.link.send(b"begin")
            except OSError as error:
                self.said = str(error).encode()

    def _tasks_go_on(self) -> bool:
        with suppress(BlockingIOError):
            os.read(self.wake, CHUNK)  # bounded: it does not block
        return not self.tracer or self.tracer.look()

    def close(self) -> None:
        for end in self.open:
            os.close(end)
        self.link.close()

    def rest(self) -> None:
        """Read what is left in the pipes, whose writers are all gone."""
        if not self.said:
            self._begun()
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
