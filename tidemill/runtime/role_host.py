"""Role host: in a forked child, builds a role and serves its calls until it is closed.

    if __name__ == "__main__":
        host(build, preload)   # build(spec) -> (object, protocol); preload() imports everything that `build` needs

A child never outlives the fork server, nor the fork server its controller, however they end: the kernel kills it (Linux), or
a thread notices (elsewhere). SIGTERM closes the object and ends the process. Ctrl-C does not reach it: the controller
handles that. Its output goes to the log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from tidemill.core import fault_injection, serialization
from tidemill.runtime.fork_server import Launch, serve_forks
from tidemill.runtime.placement import Factory
from tidemill.runtime.rpc import RpcServer
from tidemill.runtime.wire_format import Failed, failure, methods_of

_POLL_S = 0.5
_CLOSE_S = 5.0  # limit of the target's own close() after a SIGTERM
_FILELESS = sys.platform == "linux"
_LONGEST_FOLDER = 80  # a Unix socket's path holds 103 bytes on macOS


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Report of a child that is ready: the address of its socket."""

    address: str
    folder: str  # holds the socket, "" for none; the client removes it once connected


Report = Ready | Failed
REPORT_LENGTH = 4  # bytes that say how long the report is


def host(
    build: Factory, preload: Callable[[], None] = lambda: None, use_threads: Callable[[int], None] = lambda _: None
) -> None:
    """Run a fork server; in each process forked from it, build a role and serve it.

    preload: the imports before the first fork; it must not start threads. use_threads: called in a child with the number of
    threads it may compute with, since libraries that are already imported do not read the environment again.
    A child exits with status 0 after a close, with 1 when the role did not start.
    """
    birth = serve_forks(preload)  # from here on this is a child
    if not birth.bound:
        threading.Thread(target=_watch_parent, args=(birth.parent,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # writes all stacks: the watcher sends it to a process that is stuck
    fault_injection.belong_to(birth.launch.controller)
    if birth.threads is not None:
        use_threads(birth.threads)
    code = asyncio.run(_serve(build, birth.launch, birth.report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly exit of the interpreter would write to, and so copy, all pages shared with the server


async def _serve(build: Factory, launch: Launch, report: int) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None)  # one during `build` is handled after it, by the next handler
    try:
        target, protocol = build(launch.spec | {"role": launch.role, "name": launch.name})
        server = RpcServer(target, protocol, launch.token)
        loop.add_signal_handler(signal.SIGTERM, server.stop)
    except Exception as error:  # any error is reported to the parent
        traceback.print_exc()
        _report(report, failure(0, error))
        return 1
    address, folder = _place()
    try:
        _report(report, Ready(server.bind(address), folder))
        await server.run()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if not server.closed and "close" in methods_of(protocol):
        await asyncio.wait_for(target.close(), _CLOSE_S)  # type: ignore[attr-defined]
    loop.remove_signal_handler(signal.SIGTERM)  # from here on it kills this process: everything is closed
    return 0


def _report(fd: int, report: Report) -> None:
    raw = serialization.encode(report)
    with open(fd, "wb") as file:  # length first: a fork of this process may hold the pipe open
        file.write(len(raw).to_bytes(REPORT_LENGTH, "big") + raw)


def _place() -> tuple[str, str]:
    """A new address for a socket, and the folder that holds it ("" on Linux, where it is in no file system)."""
    if _FILELESS:
        return f"ipc://@tidemill-{secrets.token_hex(16)}", ""
    root = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tidemill-", dir="/tmp" if len(root.encode()) > _LONGEST_FOLDER else root)
    return f"ipc://{folder}/rpc", folder


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)  # bounded: a watch that nobody waits for
    os._exit(1)
