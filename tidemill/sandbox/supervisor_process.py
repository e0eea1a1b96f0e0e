"""A supervisor as its starter sees it: started at a level, asked to run programs, ended with all below it."""

from __future__ import annotations

import asyncio
import fcntl
import glob
import json
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import tidemill.sandbox
from tidemill.core.errors import ConfigError, Overdue, SandboxFailed
from tidemill.runtime.started_process import kill_group, started_process
from tidemill.sandbox import bubblewrap, execution, landlock, seccomp
from tidemill.sandbox.bridge import address_of, bridged
from tidemill.sandbox.execution import LENGTH, MOST_HEADER, Execution, SandboxedProgram
from tidemill.sandbox.interpreters import PATH, interpreter, readable_paths
from tidemill.sandbox.sandbox_settings import SandboxSettings
from tidemill.sandbox.system_calls import refused
from tidemill.sandbox.users import claimed_user

START_S, END_S, GRACE_S = 60.0, 30.0, 30.0  # to start; to end; beyond a program's own limit
ENVIRONMENT = {"PATH": PATH, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
BOOT = """
import json, sys
sys.path[:] = [path for path in sys.path if path]
for name, text in json.loads(sys.argv[1]).items():
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["tidemill.sandbox.supervisor"].main(json.loads(sys.argv[2]))
"""
MODULES = ("program_start", "usage", "fork_tracer", "supervisor")
FOLDERS = "tidemill-sandbox-"  # begins the names of temporary folders
SPARE_TASKS = 4096  # of the other processes of this process's user, which the kernel counts too where it is not root


@cache
def sources(network: bool) -> str:
    """The modules of the supervisor as text: it may run where this package cannot be read."""
    folder, names = Path(tidemill.sandbox.__path__[0]), ("forwarder", *MODULES) if network else MODULES
    return json.dumps({f"tidemill.sandbox.{name}": (folder / f"{name}.py").read_text() for name in names})


class SupervisorProcess:
    """A started supervisor, for one program at a time."""

    def __init__(self, process: asyncio.subprocess.Process, level: str, settings: SandboxSettings, held: ExitStack) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.level, self.pid = level, process.pid
        self._settings, self._process, self._held = settings, process, held
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self.reusable = True  # another program may run

    @classmethod
    async def start(cls, level: str, settings: SandboxSettings, channel: int = 0) -> Self:
        """Start a supervisor. channel: a descriptor that its programs get as their descriptor 3.

        Raises ConfigError when this machine has not what the level needs, SandboxFailed when it does not start.
        """
        with ExitStack() as held:
            user = held.enter_context(claimed_user())
            argv, given, passed = prepared(level, settings, user, channel, held)
            if settings.network:
                await bridged(settings.network, given["bridge"], held)
            how: dict[str, Any] = {"pass_fds": passed}
            if level == "bubblewrap" and user:
                how |= {"user": user, "group": user, "extra_groups": []}
            how |= dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
            try:
                process = await started_process(*argv, json.dumps(given), env={"PYTHONHASHSEED": "0"}, cwd="/", **how)
            except Overdue as late:
                raise SandboxFailed(f"the sandbox ({level}) did not start: {late}") from None
            started = cls(process, level, settings, held.pop_all())
        try:
            await started._message(START_S)
        except BaseException:
            await started.close()
            raise
        return started

    async def run(self, program: SandboxedProgram, stdin: bytes) -> Execution:
        """Run a program once. Raises SandboxFailed."""
        assert self.reusable
        self.reusable = False  # until its end is heard: what is given up half-way cannot be used
        self._stdin.write(execution.request(program, stdin, self._settings.packages, ENVIRONMENT))
        header, blobs = await self._message(self._settings.seconds + GRACE_S)
        try:
            stdout, stderr = blobs
            found, unconfined = execution.result_of(header, stdout, stderr, self.level), str(header["unconfined"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxFailed(f"the sandbox ({self.level}) gave no result that can be read: {error}") from None
        if unconfined:
            raise SandboxFailed(f"the sandbox ({self.level}) could not confine the program: {unconfined}")
        self.reusable = header.get("clean") is True
        return found

    async def close(self) -> None:
        """End the supervisor with all that it started."""
        self._stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            kill_group(self.pid)
            await asyncio.wait_for(self._process.wait(), END_S)
        finally:
            self._process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
            self._held.close()

    async def _message(self, limit_s: float) -> tuple[dict[str, Any], list[bytes]]:
        try:
            async with asyncio.timeout(limit_s):
                (size,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
                if size > MOST_HEADER:
                    raise SandboxFailed(f"the sandbox ({self.level}) sent a header of {size} bytes")
                header = json.loads(await self._stdout.readexactly(size))
                sizes = header["blobs"]
                if len(sizes) > 2 or sum(sizes) > 2 * 1024 * self._settings.output_kb:
                    raise SandboxFailed(f"the sandbox ({self.level}) sent {sum(sizes)} bytes, more than its limit")
                return header, [await self._stdout.readexactly(each) for each in sizes]
        except (asyncio.IncompleteReadError, TimeoutError, ValueError, KeyError, TypeError) as error:
            late = isinstance(error, TimeoutError)
            how = f"did not answer within {limit_s:g} s" if late else f"ended: {await self._last_words()}"
            raise SandboxFailed(f"the sandbox ({self.level}) {how}") from None

    async def _last_words(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                said = (await self._stderr.read(4096)).decode(errors="replace").strip()
                return said.rpartition("\n")[2][-300:] or "it said nothing"
        return "it said nothing"


def prepared(
    level: str, settings: SandboxSettings, user: int, channel: int, held: ExitStack
) -> tuple[list[str], dict[str, Any], list[int]]:
    """The command of a supervisor, its settings, and the descriptors that it inherits. Raises ConfigError."""
    python = interpreter(settings.python, user)
    readable = readable_paths(python, (*settings.packages, *settings.readable))
    command = [python, "-s", "-S", "-B", "-X", "utf8", "-c", BOOT, sources(bool(settings.network))]
    limits = settings.limits()
    given = {"limits": limits, "user": user, "channel": channel, "landlock": None, "seccomp": "", "traced": False, "port": 0}
    passed = [channel] if channel else []
    inside = level == "bubblewrap"
    if why := reason_against(level, user):
        raise ConfigError(f"sandbox level {level!r} does not work here: {why}")
    if settings.network and not inside:
        raise ConfigError(f"sandbox network = {settings.network!r} needs level 'bubblewrap', not {level!r}, which has none")
    calls = refused_calls(level, user, bool(settings.network))
    steps = seccomp.assembled(seccomp.program(calls, seccomp.machine())) if level != "limits" else b""
    limits["tasks"] = limits["processes"] + (1 if inside else 0 if user else SPARE_TASKS)
    if inside:
        given |= {"user": 0, "folder": bubblewrap.FOLDER}
        if landlock.abi() >= landlock.TRUNCATION_SINCE:  # a second wall, behind which one sandbox can run many programs
            given["landlock"] = landlock.ruleset([*readable, "/proc"], network=bool(settings.network))
        passed.append(_filled(steps, held))
        bridge = ""
        if settings.network:
            bridge = given["bridge"] = own_folder(held)
            os.chmod(bridge, 0o711)
            given["port"] = address_of(settings.network)[1]
        inner = {"user": user, "readable": readable, "disk": int(limits["disk"]), "bridge": bridge}
        return bubblewrap.command(command, filter_end=passed[-1], **inner), given, passed
    folder = own_folder(held)
    os.chmod(folder, 0o711 if user else 0o700)
    given |= {"folder": folder, "seccomp": steps.hex()}
    if level == "landlock":
        given |= {"landlock": landlock.ruleset(readable), "traced": not user}
    return command, given, passed


def reason_against(level: str, user: int) -> str:
    """The reason why a level cannot work here; "" if nothing is known against it. user: as of `claimed_user`."""
    if os.uname().sysname != "Linux":
        return "it is of Linux"
    if level == "limits":
        return ""
    if not seccomp.machine():
        return f"there is no filter of system calls for {os.uname().machine}"
    return bubblewrap.lacking(user) if level == "bubblewrap" else landlock.lacking(bool(user))


def refused_calls(level: str, user: int, network: bool = False) -> tuple[Any, ...]:
    """The system calls that programs of a level may not make."""
    if level == "bubblewrap":
        return refused(shared=False, sockets=network)  # what stays in an IPC namespace would be there for its next program
    kept_within = bool(user) or landlock.abi() >= landlock.SIGNALS_SINCE
    return refused(shared=False, own_files=bool(user), signals=kept_within)


def own_folder(held: ExitStack) -> str:
    """A new temporary folder, locked and removed with `held`. Folders of starters that were killed are removed first."""
    for left in glob.glob(os.path.join(tempfile.gettempdir(), f"{FOLDERS}*")):
        with suppress(OSError), ExitStack() as lock:
            _lock(left, lock)
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=FOLDERS)
    _lock(folder, held)
    held.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock(folder: str, held: ExitStack) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    held.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _filled(content: bytes, held: ExitStack) -> int:
    """A descriptor to read `content` from, open until `held` is closed."""
    read, write = os.pipe()
    held.callback(os.close, read)
    os.write(write, content)  # a filter is smaller than a pipe's room
    os.close(write)
    return read
