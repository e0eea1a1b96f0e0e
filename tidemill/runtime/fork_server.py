"""Fork server: imports what roles need once, then only forks role processes from itself.

    controller -> ForkRequest + 3 descriptors | Reap                 stdin is the socket; MessagePack, length first
    controller <- Serving, Forked | ForkRefused, ProcessEnded        Serving: the imports are done

A fork copies only the thread that calls it, whatever locks and pools other threads hold. So this process has one thread,
computes nothing and touches no device. `serve_forks` returns in the children only, so that their stack holds nothing of the
server's. A child that has ended is reaped when the controller has confirmed that it knows: until then no other process can
get its id. The server ends with the controller, and its children end with the server.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tidemill.core import fault_injection
from tidemill.runtime.workers.keeper import die_with_parent

DESCRIPTORS = 3  # sent with a ForkRequest: the child's report pipe, its log, its working directory
LENGTH = 4  # bytes of the length before each message
MOST = 16 << 20  # bytes per message: a launch and an environment, which systems limit to a few megabytes

Pid = Annotated[int, msgspec.Meta(gt=1)]  # signals to 0, 1 or -1 would go to others


class Launch(msgspec.Struct, frozen=True):
    """Description of a child to start. It travels by socket: every user could read the token on a command line."""

    controller: Pid
    token: str
    role: str
    name: str
    spec: dict[str, Any]


class ForkRequest(msgspec.Struct, frozen=True, tag="fork"):
    """Request to fork one child; three descriptors travel with it."""

    id: int
    launch: Launch
    threads: int | None  # for numerical libraries; None: their own default
    environment: list[tuple[bytes, bytes]]


class Reap(msgspec.Struct, frozen=True, tag="reap"):
    """Confirmation that the controller knows of a process's end and sends it no more signals."""

    pid: Pid


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """Notice that the imports are done and the server can fork."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    id: int  # of the ForkRequest
    pid: Pid


class ForkRefused(msgspec.Struct, frozen=True, tag="refused"):
    id: int  # of the ForkRequest
    why: str


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Notice that a child has ended; it is not reaped before a Reap."""

    pid: Pid
    code: int  # exit status, or the signal's number, negative


Request = ForkRequest | Reap
Notice = Serving | Forked | ForkRefused | ProcessEnded


@dataclass(frozen=True)
class Birth:
    """Start data of a forked child: its launch, its threads, its report pipe, its parent."""

    launch: Launch
    threads: int | None
    report: int  # descriptor
    parent: int  # the server's process id
    bound: bool  # the kernel kills this process when the server ends


def frame(message: Request | Notice) -> bytes:
    """Encode a message with its length before it. Raises ValueError when it is too long."""
    raw = msgspec.msgpack.encode(message)  # JSON has no infinity
    if len(raw) > MOST:
        raise ValueError(f"a message of {len(raw)} bytes to start a process; at most {MOST} travel: is its spec that large?")
    return len(raw).to_bytes(LENGTH, "big") + raw


def serve_forks(preload: Callable[[], None]) -> Birth:
    """Import, then fork on request until the controller ends. Returns in the children only."""
    with _channel() as channel:
        die_with_parent()  # where the kernel cannot do that, the end of the channel ends this process
        preload()
        if (threads := thread_count()) != 1:
            sys.exit(f"cannot fork: {threads} threads run after the imports, expected 1; which of them starts threads?")
        gc.collect()
        gc.freeze()  # otherwise the first collection in each child would write to, and so copy, all shared pages
        return _Server(channel).run()


def thread_count() -> int:
    """The number of threads of this process; outside Linux only those that Python started."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()


def _channel() -> socket.socket:
    """Take the socket that came as stdin, and put an empty stdin in its place, which imports may read."""
    try:
        channel = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("stdin is no socket: this module is run by tidemill.runtime.local, not by hand")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return channel


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, bool] = {}  # by process id: True once its end was reported
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the signal only has to wake `select`

    def run(self) -> Birth:
        self._tell(Serving())
        while True:
            # bounded: it serves until its controller ends, and with it the channel
            readable, _, _ = select.select([self._channel, self._woken], [], [])
            if self._woken in readable:
                self._woken.recv(1 << 12, socket.MSG_DONTWAIT)
                self._tell_ends()
            if self._channel in readable and (birth := self._answer()):
                return birth

    def _answer(self) -> Birth | None:
        request, descriptors = self._receive()
        if isinstance(request, ForkRequest):
            if len(descriptors) != DESCRIPTORS:
                sys.exit(f"the controller sent {len(descriptors)} descriptors with a Fork, expected {DESCRIPTORS}")
            return self._fork(request, descriptors)
        if request.pid in self._children:
            os.waitpid(request.pid, os.WNOHANG)
            del self._children[request.pid]
        return None

    def _fork(self, request: ForkRequest, descriptors: list[int]) -> Birth | None:
        sys.stdout.flush()  # otherwise the child would write the buffer again
        sys.stderr.flush()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(ForkRefused(request.id, f"the system refused to fork: {error}"))
        else:
            if pid == 0:
                self._close()
                return _begin(request, descriptors, server)
            self._children[pid] = False
            self._tell(Forked(request.id, pid))
        for each in descriptors:
            os.close(each)
        return None

    def _tell_ends(self) -> None:
        for pid, told in list(self._children.items()):
            if not told and (code := _end_of(pid)) is not None:
                self._children[pid] = True
                self._tell(ProcessEnded(pid, code))

    def _tell(self, notice: Notice) -> None:
        try:
            self._channel.sendall(frame(notice))  # bounded: the controller reads, or ends
        except OSError:
            os._exit(0)  # the controller is gone, and the children end with this process

    def _receive(self) -> tuple[Request, list[int]]:
        """Read one request and its descriptors. Without either this process ends: there is nobody else to serve."""
        try:
            # bounded: there is something to read, and the rest of a message follows its head
            head, descriptors, _, _ = socket.recv_fds(self._channel, LENGTH, DESCRIPTORS + 1)
            for each in descriptors:
                os.set_inheritable(each, False)
            length = int.from_bytes(head + self._exactly(LENGTH - len(head)), "big")
            if length > MOST:
                sys.exit(f"the controller sent a message of {length} bytes, at most {MOST} are taken")
            return msgspec.msgpack.decode(self._exactly(length), type=Request), descriptors
        except (EOFError, OSError):
            os._exit(0)  # as in `_tell`
        except msgspec.DecodeError as error:
            sys.exit(f"the controller sent a message that is not readable: {error}")

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self._channel.recv(size - len(data))  # bounded: the controller sends it, or ends
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _close(self) -> None:
        """Close the server's signal handlers and sockets, in a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._channel, self._woken, self._waking):
            each.close()


def _end_of(pid: int) -> int | None:
    """Exit status of a child or its signal's number, negative; None while it runs. It is not reaped if possible."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _begin(request: ForkRequest, descriptors: list[int], server: int) -> Birth:
    """Turn a fork into a process of its own: session, output streams, folder, environment."""
    bound = die_with_parent()
    if os.getppid() != server:
        os._exit(1)  # the server ended before `die_with_parent` took effect
    os.setsid()
    report, log, folder = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.fchdir(folder)
    os.close(log)
    os.close(folder)
    os.environ.clear()
    os.environb.update(request.environment)
    fault_injection.arm(os.environ)  # again, for this child's environment
    return Birth(request.launch, request.threads, report, server, bound)
