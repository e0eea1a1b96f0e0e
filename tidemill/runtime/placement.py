"""Where a role runs. `Inline` and `Local` start the same objects behind the same handle; callers cannot tell them apart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Liveness:
    """How a process is watched, in seconds."""

    every_s: float = 1.0  # between two heartbeats
    silent_s: float = 60.0  # it does not answer one: stopped, or starved
    stuck_s: float = 900.0  # it answers, but a call of it makes no progress


@dataclass(slots=True)
class Vitals:
    """What is known of a process now."""

    name: str
    pid: int
    alive: bool
    heard: float  # seconds since its last heartbeat
    progress: float
    busy: list[tuple[str, float]]  # calls in flight there, oldest first: method, seconds


Built = tuple[object, type]
"""An object, and the protocol whose methods of it may be called."""

Factory = Callable[[dict[str, Any]], Built | Awaitable[Built]]
"""Makes the object that a spec describes (plain data, `role` and `name` among its keys), in a running event loop."""


class Handle(Protocol[T_co]):
    """A started role."""

    name: str

    @property
    def proxy(self) -> T_co: ...

    async def wait(self) -> str:
        """How it ended, once it has."""
        ...

    def vitals(self) -> Vitals: ...

    def kill(self, why: str) -> None:
        """End it now; `wait` then says why."""
        ...

    async def stop(self, deadline: float = 10.0) -> str:
        """End it, by force when it does not within `deadline` seconds; returns how it ended. Safe to call again."""
        ...


class Placement(Protocol):
    async def start(
        self,
        protocol: type[T],
        role: str,
        name: str,
        spec: dict[str, Any],
        threads: int | None = None,
        deadlines: Mapping[str, float] | None = None,
    ) -> Handle[T]:
        """Start `name` in `role`. Raises what building it raised: ValueError family as it is, else StartFailed."""
        ...

    def begin(self) -> None:
        """Make ready what the first start needs, without waiting for it."""
        ...

    async def close(self) -> None:
        """Leave nothing behind; what was not stopped ends. Safe to call again, but nothing starts any more."""
        ...


class StartFailed(RuntimeError):
    """A role could not be started, for a reason that is not the configuration's."""
