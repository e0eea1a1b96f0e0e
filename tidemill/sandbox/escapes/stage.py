"""Stage of the escape suite: secrets, processes, sockets and files that a sandboxed program must not reach."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tidemill.sandbox.interpreters import interpreter
from tidemill.sandbox.sandbox_settings import SandboxSettings

VICTIM = """
import ctypes, os, sys
held = ctypes.create_string_buffer(os.environ["SECRET"].encode(), 64)
print(ctypes.addressof(held), os.open("/", os.O_RDONLY), flush=True)
sys.stdin.read()
"""
START_S, END_S = 60.0, 10.0


class EscapeStage:
    """The facts that an attempt is told, and the processes behind them."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._victim: asyncio.subprocess.Process | None = None

    @property
    def victim_lives(self) -> bool:
        return self._victim is not None and self._victim.returncode is None

    async def start_victim(self) -> None:
        """Start the process that attempts are made on, unless it lives."""
        if self.victim_lives:
            return
        secret, pipe = self.facts["secret"], asyncio.subprocess.PIPE
        self._victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", VICTIM, secret), stdin=pipe, stdout=pipe, env={"SECRET": secret}
        )
        assert self._victim.stdout is not None
        address, descriptor = (await asyncio.wait_for(self._victim.stdout.readline(), START_S)).split()
        self.facts |= {"victim": self._victim.pid, "address": int(address), "descriptor": int(descriptor)}

    async def end_victim(self) -> None:
        if self._victim is not None:
            with suppress(ProcessLookupError):
                self._victim.kill()
            await asyncio.wait_for(self._victim.wait(), END_S)
            self._victim._transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    def daemon_lives(self) -> bool:
        """True while a process that an attempt has left behind runs."""
        mark = self.facts["daemon"].encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            for file in ("cmdline", "comm"):
                with suppress(OSError):
                    if int(name) != os.getpid() and mark in Path(f"/proc/{name}/{file}").read_bytes():
                        return True
        return False


@asynccontextmanager
async def staged(settings: SandboxSettings) -> AsyncIterator[EscapeStage]:
    """A stage for attempts in a sandbox of these settings."""
    secret = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="tidemill-stage-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix="tidemill-stage-", dir="/tmp"))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        shared = Path("/dev/shm", folder.name)
        stack.callback(shared.unlink, missing_ok=True)
        for path in (folder / "secret", temporary / "secret", shared):
            path.write_text(secret)
            path.chmod(0o644)
        for name in ("open", "removed", "renamed"):
            (folder / name).write_text("as it was")
            (folder / name).chmod(0o666)
        shutil.copy(shutil.which("true") or "/bin/true", folder / "program")
        for path, mode in ((folder, 0o777), (temporary, 0o755), (folder / "program", 0o755)):
            path.chmod(mode)
        left_open = os.open(folder / "secret", os.O_RDONLY)
        os.set_inheritable(left_open, True)
        stack.callback(os.close, left_open)
        facts = {
            "secret": secret,
            "starter": os.getpid(),
            "root": os.getuid() == 0,
            "folder": str(folder),
            "file": str(folder / "secret"),
            "open_file": str(folder / "open"),
            "program": str(folder / "program"),
            "temporary": str(temporary / "secret"),
            "shared": str(shared),
            "home": os.path.expanduser("~"),
            "code": str(Path(__file__).parents[3]),
            "daemon": f"esc-{secrets.token_hex(4)}",
            "python": interpreter(settings.python, 0),
            **{name: getattr(settings, name) for name in ("seconds", "memory_mb", "disk_mb", "processes", "output_kb")},
            **await _sockets(stack, folder),
            **_shared_with_all(stack, secret),
        }
        stage = EscapeStage(facts)
        stack.push_async_callback(stage.end_victim)
        await stage.start_victim()
        yield stage


async def _sockets(stack: AsyncExitStack, folder: Path) -> dict[str, Any]:
    """Listeners of every kind that a program could connect to."""

    async def heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    abstract, path = f"{folder.name}-listener", str(folder / "listener")
    found: dict[str, Any] = {"abstract": abstract, "unix": path, "tcp6": 0}
    for name, host in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
        with suppress(OSError):  # a machine without IPv6
            server = await asyncio.start_server(heard, host, 0)
            stack.callback(server.close)
            found[name] = server.sockets[0].getsockname()[1]
    for name in (path, "\0" + abstract):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.bind(name)
        stack.callback((await asyncio.start_unix_server(heard, sock=end)).close)
    os.chmod(path, 0o777)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(_Echo, local_addr=("127.0.0.1", 0))
    stack.callback(transport.close)
    return {**found, "udp": transport.get_extra_info("sockname")[1]}


class _Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(b"heard", addr)


def _shared_with_all(stack: AsyncExitStack, secret: str) -> dict[str, Any]:
    """A segment of shared memory and a message queue, which everybody may use."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1666)
    if segment >= 0:
        stack.callback(libc.shmctl, segment, 0, None)
        address = libc.shmat(segment, None, 0)
        ctypes.memmove(address, secret.encode(), len(secret))
        libc.shmdt(ctypes.c_void_p(address))
    queue, before = f"tidemill-stage-{os.getpid()}", os.umask(0)
    handle = libc.mq_open(b"/" + queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    os.umask(before)
    if handle >= 0:
        stack.callback(libc.mq_unlink, b"/" + queue.encode())
        os.close(handle)
    return {"segment": segment, "queue": queue}
