"""A small role for the placement tests: `python echo_worker.py` is what the children run."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tidemill.core import fault_injection
from tidemill.core.errors import ConfigError, PolicyMismatch
from tidemill.core.types import Array, SamplingParams

WORKER = [sys.executable, __file__]
_POLLING = """
import sys; sys.path.insert(0, sys.argv[1])
import echo_worker
from tidemill.runtime import fork_server, role_host
fork_server.die_with_parent = lambda: False
role_host.host(echo_worker.build)
"""
WITHOUT_THE_KERNEL = [sys.executable, "-c", _POLLING, str(Path(__file__).parent)]  # whose word ends orphans at once
Start = Callable[..., Awaitable[Any]]  # the fixture `start`


class Echo(Protocol):
    async def echo(self, array: Array) -> Array: ...
    async def describe(self, name: str, params: SamplingParams, times: int = 2) -> dict[str, str]: ...
    async def fail(self, kind: str) -> None: ...
    async def hold(self, key: str) -> None: ...
    async def release(self, key: str) -> str: ...
    async def held(self) -> list[str]: ...
    async def cancelled(self) -> list[str]: ...
    async def pid(self) -> int: ...
    async def environment(self, key: str) -> str: ...
    async def threads(self) -> int: ...
    async def descriptors(self) -> list[str]: ...
    async def reach(self, phase: str) -> None: ...
    async def wrong(self) -> int: ...
    async def block(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class Other(Protocol):
    async def nothing_of_the_kind(self) -> None: ...


class Odd(ValueError):
    """Unknown to the wire; its ancestor is not."""


class Echoing:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.closed = 0
        self._events: dict[str, asyncio.Event] = {}
        self._cancelled: list[str] = []

    async def echo(self, array: Array) -> Array:
        return np.asarray(array)

    async def describe(self, name: str, params: SamplingParams, times: int = 2) -> dict[str, str]:
        return {
            "name": name * times,
            "max_tokens": str(params.max_tokens),
            "role": self.spec["role"],
            "as": self.spec["name"],
            "limit": str(self.spec.get("limit")),
        }

    async def fail(self, kind: str) -> None:
        raise {
            "value": ValueError("max_tokens=-1: expected more"),
            "odd": Odd("an odd value"),
            "policy": PolicyMismatch("not those weights"),
            "config": ConfigError("no such key"),
            "timeout": TimeoutError("the verifier took too long"),
            "other": ZeroDivisionError("by zero"),
        }[kind]

    async def hold(self, key: str) -> None:
        event = self._events[key] = asyncio.Event()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self._cancelled.append(key)
            raise
        finally:
            del self._events[key]

    async def release(self, key: str) -> str:
        self._events[key].set()
        return key

    async def held(self) -> list[str]:
        return sorted(self._events)

    async def cancelled(self) -> list[str]:
        return sorted(self._cancelled)

    async def pid(self) -> int:
        return os.getpid()

    async def environment(self, key: str) -> str:
        return os.environ.get(key, "")

    async def threads(self) -> int:
        return told[-1] if told else 0

    async def descriptors(self) -> list[str]:
        return sorted(os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    async def reach(self, phase: str) -> None:
        fault_injection.reach("engine-0", phase)

    async def wrong(self) -> int:
        return "not a number"  # type: ignore[return-value]

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # the whole process, as a long kernel would

    def plain(self) -> None:
        """Not of the protocol, and not async: nobody's business but its own."""

    async def close(self) -> None:
        self.closed += 1
        if self.spec.get("close") == "fails":
            raise ValueError("cannot close")
        if self.spec.get("close") == "hangs":
            await asyncio.Event().wait()


told: list[int] = []  # by whoever starts it: with how many threads to compute


def build(spec: dict[str, Any]) -> tuple[object, type]:
    match spec.get("start"):
        case "value":
            raise ConfigError("model='nope': expected a folder")
        case "other":
            raise ZeroDivisionError("by zero")
        case "killed":
            print("about to go", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
        case "forks":
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
        case "forks and is killed":
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "grandchild":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", spec["mark"]])
        case "leaves":
            atexit.register(print, "taken apart")
            print("not flushed by itself", end="")
            return Echoing(spec), Echo
    print("printed to stdout", flush=True)
    return Echoing(spec), Echo


if __name__ == "__main__":
    from tidemill.runtime.role_host import host

    host(build, use_threads=told.append)
