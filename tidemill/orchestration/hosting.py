"""The child's side of `local`: read what to be from stdin, build it, serve it until told to close.

    if __name__ == "__main__":
        host(build)            # build(spec) -> (object, protocol); import what is heavy inside of it

A child never outlives its parent, however that ended: the kernel kills it (Linux), or a thread notices (elsewhere). SIGTERM
closes the object and ends the process; Ctrl-C is the controller's affair and does not reach it. What is printed goes to the
log.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tidemill import codec, faults
from tidemill.orchestration.placement import Built, Factory
from tidemill.orchestration.rpc import Server
from tidemill.orchestration.wire import Failed, failure, methods_of

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_CLOSE_S = 5.0  # for the target's own close() after a SIGTERM
_LONGEST_FOLDER = 80  # a Unix socket's path holds 103 bytes on macOS, 107 on Linux


class Launch(msgspec.Struct, frozen=True):
    """What the parent writes to the child's stdin, as JSON: never on a command line, where every user could read it."""

    parent: int  # process id
    report: int  # descriptor to write Ready or Failed to
    token: str
    role: str
    name: str
    spec: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    address: str
    folder: str  # holds the socket; whoever has connected removes it


Report = Ready | Failed
REPORT_LENGTH = 4  # bytes that say how long the report is


def host(build: Factory) -> None:
    """Serve what `build` makes of the launch on stdin. Ends the process: status 0 after a close, 1 when it did not start."""
    told = _die_with_parent()
    # bounded: the parent writes it at once, and we die with it
    launch = msgspec.json.decode(sys.stdin.buffer.read() or b"null", type=Launch | None)
    if launch is None or os.getppid() != launch.parent:
        sys.exit(1)  # the parent went before the kernel was asked to tell us
    if not told:
        threading.Thread(target=_watch_parent, args=(launch.parent,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # all stacks, for whoever finds us stuck
    faults.belong_to(launch.parent)
    sys.exit(asyncio.run(_serve(build, launch)))


async def _serve(build: Factory, launch: Launch) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        target, protocol = await _built(build, launch)
        server = Server(target, protocol, launch.token)
    except Exception as error:  # reported to the parent, whatever it is
        traceback.print_exc()
        _report(launch.report, failure(0, error))
        return 1
    folder = _private_folder()
    try:
        address = server.bind(f"ipc://{folder}/rpc")
        _report(launch.report, Ready(address, str(folder)))
        await _run(server, stopping)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not server.closed and "close" in methods_of(protocol):
        await asyncio.wait_for(target.close(), _CLOSE_S)  # type: ignore[attr-defined]
    loop.remove_signal_handler(signal.SIGTERM)  # from here on it kills: nothing is left to lose
    return 0


async def _built(build: Factory, launch: Launch) -> Built:
    built = build(launch.spec | {"role": launch.role, "name": launch.name})
    return await built if inspect.isawaitable(built) else built  # bounded: by the parent's limit for a start


async def _run(server: Server, stopping: asyncio.Event) -> None:
    async def stop() -> None:
        await stopping.wait()  # bounded: a watch that ends with the server
        server.stop()

    waiting = asyncio.create_task(stop())
    try:
        await server.run()
    finally:
        waiting.cancel()


def _report(fd: int, report: Report) -> None:
    raw = codec.encode(report)
    with open(fd, "wb") as file:  # with its length: a fork of ours may hold the pipe open
        file.write(len(raw).to_bytes(REPORT_LENGTH, "big") + raw)


def _private_folder() -> Path:
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="tidemill-", dir="/tmp" if len(root.encode()) > _LONGEST_FOLDER else root))


def _die_with_parent() -> bool:
    """Have the kernel kill us when the thread that started us ends. False where it cannot; see `_watch_parent`."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)  # bounded: a watch, for which nobody waits
    os._exit(1)
