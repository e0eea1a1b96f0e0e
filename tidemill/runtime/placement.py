"""Placement protocol: starts roles in this process (`Inline`) or in others (`Local`), behind the same handle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from tidemill.core.errors import StartFailed
from tidemill.runtime.rpc import check_deadlines
from tidemill.runtime.wire_format import keeps_its_type, methods_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Limits by which a process is watched, in seconds."""

    every_s: float = 1.0  # between two heartbeats
    silent_s: float = 60.0  # without an answer to a heartbeat: the process is stopped or starved
    stuck_s: float = 900.0  # with answers, but without progress in a running call


@dataclass(slots=True)
class Vitals:
    """Current state of a process."""

    name: str
    pid: int
    alive: bool
    heard: float  # seconds since its last heartbeat
    progress: float
    busy: list[tuple[str, float]]  # calls in flight there, oldest first: method, seconds


@dataclass(frozen=True, slots=True)
class Resources:
    """Threads and device of one role."""

    threads: int | None = None  # of the numerical libraries; None: their own default
    device: str = ""  # the only device that the role sees, as its cuda:0: cuda:N as numbered here; "": it sees all


Built = tuple[object, type]
"""An object, and the protocol that names its callable methods."""

Factory = Callable[[dict[str, Any]], Built]
"""Builds the object that a spec describes (plain data, `role` and `name` among its keys), in a running event loop."""


class Handle(Protocol[T_co]):
    """A started role."""

    name: str

    @property
    def proxy(self) -> T_co: ...

    async def wait(self) -> str:
        """Wait for the role to end; returns how it ended."""
        ...

    def vitals(self) -> Vitals: ...

    def kill(self, why: str) -> None:
        """End it now; `wait` then says why."""
        ...

    async def stop(self, deadline: float = 10.0) -> str:
        """End the role, by force after `deadline` seconds; returns how it ended. Safe to call again."""
        ...


class Placement(Protocol):
    """Starts roles and ends them; `Inline` and `Local` implement it."""

    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        resources: Resources = Resources(),
        deadlines: Mapping[str, float] | None = None,
    ) -> Handle[T]:
        """Start `name` in `role`. Raises ValueErrors of its construction as they are, else StartFailed."""
        ...

    def begin(self) -> None:
        """Begin to prepare what the first start needs, without waiting for it."""
        ...

    async def close(self) -> None:
        """End every role that was not stopped. Safe to call again; nothing can be started afterwards."""
        ...


class InlineHandle(Generic[T]):
    """Handle of a role in this process; its proxy is the object itself."""

    def __init__(self, name: str, proxy: T, closable: bool) -> None:
        self.name, self.proxy, self._closable = name, proxy, closable
        self._closed = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)  # bounded: until `stop`, for those who want to know

    def vitals(self) -> Vitals:
        return Vitals(self.name, os.getpid(), not self._ended.done(), 0.0, 0.0, [])

    def kill(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    async def stop(self, deadline: float = 10.0) -> str:
        how = "was stopped"
        if self._closable and not self._closed:
            self._closed = True
            try:
                async with asyncio.timeout(deadline):
                    await cast(Any, self.proxy).close()
            except TimeoutError:
                how = f"did not close within {deadline:g} s"
            except Exception as error:  # it has ended all the same, but say so
                how = f"was stopped; its close() failed: {error}"
        self.kill(how)
        return self._ended.result()


class Inline:
    """Placement that builds every role in this process, so that `breakpoint()` works everywhere.

    The proxy is the object itself, hence there is no deadline on calls: a peer in the same process cannot die alone.
    """

    def __init__(self, build: Factory) -> None:
        self._build = build

    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        resources: Resources = Resources(),  # ignored: the threads and devices of this process are not changed
        deadlines: Mapping[str, float] | None = None,  # checked, then not needed
    ) -> InlineHandle[T]:
        """Build the role. Raises ValueErrors of its construction as they are, else StartFailed."""
        check_deadlines(protocol, deadlines)
        try:
            target, served = self._build(spec | {"role": role, "name": name})
        except Exception as error:  # fail as a role in its own process does
            if keeps_its_type(error):
                raise
            raise StartFailed(f"{name} did not start: {type(error).__name__}: {error}") from error
        if missing := set(methods_of(protocol)) - set(methods_of(served)):
            raise ValueError(f"{name} does not serve {', '.join(sorted(missing))}")
        return InlineHandle(name, cast(T, target), "close" in methods_of(protocol))

    def begin(self) -> None: ...

    async def close(self) -> None: ...
