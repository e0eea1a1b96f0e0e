"""Placement protocol: starts roles in this process or in others, behind the same handle.

`Inline` and `Local` start the same objects; callers cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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
        threads: int | None = None,
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
