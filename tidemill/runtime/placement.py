"""Placement protocol: starts roles in this process (`Inline`) or in others (`Local`), behind the same handle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from tidemill.core.errors import ConfigError, StartFailed
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

    async def start_group(
        self,
        protocol: type[T],
        role: str,
        specs: Mapping[str, dict[str, Any]],
        resources: Sequence[Resources],
        deadlines: Mapping[str, float] | None = None,
    ) -> RoleGroup[T]:
        """Start several of one role, by name, which meet and end together. resources: of each, in order.

        Each spec is given `rank` and `meeting`, a file that all of them can open. Raises as `start`; then none is left.
        """
        ...

    def begin(self) -> None:
        """Begin to prepare what the first start needs, without waiting for it."""
        ...

    async def close(self) -> None:
        """End every role that was not stopped. Safe to call again; nothing can be started afterwards."""
        ...


class RoleGroup(Generic[T]):
    """Handle of roles that end together, as the ranks of a trainer: the loss of one is the loss of all."""

    proxy: T  # all of them as one; set by who knows how to join them

    def __init__(self, handles: Sequence[Handle[T]], let_go: Callable[[], None]) -> None:
        """let_go: called when all have ended."""
        self.handles, self.name, self._let_go = list(handles), handles[0].name, let_go
        self._stopping = False
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> str:
        waits = {asyncio.ensure_future(handle.wait()): handle for handle in self.handles}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # bounded: a watch, by the processes' heartbeats
            ended, handle = next((each, handle) for each, handle in waits.items() if each.done())
            if not self._stopping:
                self.kill(f"was ended because {handle.name} {ended.result().partition(';')[0]}")
            await asyncio.wait(waits)  # bounded: they were killed, or are being stopped
            self._let_go()
            others = "" if handle is self.handles[0] else f"lost a rank: {handle.name} "
            return others + ended.result()
        finally:
            for each in waits:
                each.cancel()

    async def wait(self) -> str:
        return await asyncio.shield(self._watching)  # bounded: until `stop`, for those who want to know

    def vitals(self) -> Vitals:
        return self.handles[0].vitals()

    def kill(self, why: str) -> None:
        for handle in self.handles:
            handle.kill(why)

    async def stop(self, deadline: float = 10.0) -> str:
        self._stopping = True
        results = await asyncio.gather(*(handle.stop(deadline) for handle in self.handles), return_exceptions=True)
        if failed := next((each for each in results if isinstance(each, BaseException)), None):
            raise failed
        return await self.wait()  # bounded: all were stopped


def members_of(handle: Handle[T]) -> list[Handle[T]]:
    """The handles of a group, or the one handle of a role that has no others."""
    return handle.handles if isinstance(handle, RoleGroup) else [handle]


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

    async def start_group(
        self,
        protocol: type[T],
        role: str,
        specs: Mapping[str, dict[str, Any]],
        resources: Sequence[Resources],
        deadlines: Mapping[str, float] | None = None,
    ) -> RoleGroup[T]:
        raise ConfigError(
            f"placement.kind = 'inline' has one process, and {len(specs)} ranks of the {role} need one each: set "
            "placement.kind = 'local', or trainer.ranks = 1"
        )

    def begin(self) -> None: ...

    async def close(self) -> None: ...
