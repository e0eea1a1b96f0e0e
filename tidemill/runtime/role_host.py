"""The child's side of `local`: forked from the server that imported everything, build a role, serve it until told to close.

    if __name__ == "__main__":
        host(build, preload)   # build(spec) -> (object, protocol); preload() imports all that it needs

A child never outlives the server it was forked from, nor that its controller, however they ended: the kernel kills it
(Linux), or a thread notices (elsewhere). SIGTERM closes the object and ends the process; Ctrl-C is the controller's affair
and does not reach it. What is printed goes to the log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
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
from tidemill.runtime.placement import Built, Factory
from tidemill.runtime.rpc import RpcServer
from tidemill.runtime.wire_format import Failed, failure, methods_of

_POLL_S = 0.5
_CLOSE_S = 5.0  # for the target's own close() after a SIGTERM
_FILELESS = sys.platform == "linux"
_LONGEST_FOLDER = 80  # a Unix socket's path holds 103 bytes on macOS


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    address: str
    folder: str  # holds the socket, "" for none; whoever has connected removes it


Report = Ready | Failed
REPORT_LENGTH = 4  # bytes that say how long the report is


def host(
    build: Factory, preload: Callable[[], None] = lambda: None, use_threads: Callable[[int], None] = lambda _: None
) -> None:
    """Be a fork server; in each process forked from it, serve what `build` makes of the launch.

    preload: imports, before the first fork; it may not start threads. use_threads: is told in a child how many threads it
    may compute with, since libraries that are imported already do not look at the environment again.
    A child ends with status 0 after a close, 1 when it did not start.
    """
    birth = serve_forks(preload)  # from here on this is a child
    if not birth.bound:
        threading.Thread(target=_watch_parent, args=(birth.parent,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # all stacks, for whoever finds us stuck
    fault_injection.belong_to(birth.launch.controller)
    if birth.threads is not None:
        use_threads(birth.threads)
    code = asyncio.run(_serve(build, birth.launch, birth.report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking an interpreter apart writes to, and so copies, all that was shared with the server until then


async def _serve(build: Factory, launch: Launch, report: int) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        target, protocol = await _built(build, launch)
        server = RpcServer(target, protocol, launch.token)
    except Exception as error:  # reported to the parent, whatever it is
        traceback.print_exc()
        _report(report, failure(0, error))
        return 1
    address, folder = _place()
    try:
        _report(report, Ready(server.bind(address), folder))
        await _run(server, stopping)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if not server.closed and "close" in methods_of(protocol):
        await asyncio.wait_for(target.close(), _CLOSE_S)  # type: ignore[attr-defined]
    loop.remove_signal_handler(signal.SIGTERM)  # from here on it kills: nothing is left to lose
    return 0


async def _built(build: Factory, launch: Launch) -> Built:
    built = build(launch.spec | {"role": launch.role, "name": launch.name})
    return await built if inspect.isawaitable(built) else built  # bounded: by the parent's limit for a start


async def _run(server: RpcServer, stopping: asyncio.Event) -> None:
    async def stop() -> None:
        await stopping.wait()  # bounded: a watch that ends with the server
        server.stop()

    waiting = asyncio.create_task(stop())
    try:
        await server.run()
    finally:
        waiting.cancel()


def _report(fd: int, report: Report) -> None:
    raw = serialization.encode(report)
    with open(fd, "wb") as file:  # with its length: a fork of ours may hold the pipe open
        file.write(len(raw).to_bytes(REPORT_LENGTH, "big") + raw)


def _place() -> tuple[str, str]:
    """A socket's address, and the folder that it lies in. On Linux there is none: its name is in no file system, so that the
    kernel takes it back when its process ends, whatever ended it. `RpcServer.bind` says who may connect."""
    if _FILELESS:
        return f"ipc://@tidemill-{secrets.token_hex(16)}", ""
    root = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tidemill-", dir="/tmp" if len(root.encode()) > _LONGEST_FOLDER else root)
    return f"ipc://{folder}/rpc", folder


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)  # bounded: a watch, for which nobody waits
    os._exit(1)
