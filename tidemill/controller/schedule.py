"""The loop's schedule, the functions that it awaits at set points, and the receiver of its events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tidemill.core.errors import PeerLost
from tidemill.core.types import Array, Group, Metrics, Sample, TrainResult, Version


class Observer(Protocol):
    """Receiver of the loop's events, in order. It cannot change what happens."""

    def rolled_out(self, group: Group, dropped: str | None) -> None: ...
    async def trained(
        self, step: int, groups: Sequence[Group], samples: Sequence[Sample], result: TrainResult, metrics: Metrics
    ) -> None: ...
    def published(self, version: Version) -> None: ...
    def evaluated(self, step: int, results: Metrics) -> None: ...
    def saving(self, step: int) -> None:
        """All steps are trained, and the run waits until the checkpoint of this step is written."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """The loop's length and the steps at which it does more than train.

    Steps are counted from the beginning of the run.
    """

    steps: int
    first: int = 0  # > 0 when a run goes on
    saved: int = 0  # step of the newest checkpoint; 0: there is none
    incarnation: int = 0
    eval_every: int = 0  # 0: never
    checkpoint_every: int = 0  # 0: only at the end
    probe_every: int = 0  # 0: never
    deterministic: bool = False  # the policy that samples a group depends on the group alone
    stream: int = 0  # finished tokens with which a waiting trainer begins, if by_group; 0: it waits for all
    barren: int = 100  # the run stops when this many times a step's groups are dropped in a row


async def nothing(served: Sequence[Version]) -> None:
    """Do nothing."""


@dataclass(slots=True)
class Hooks:
    """Functions that the loop awaits at set points. None: nothing is done there."""

    # the versions that all engines serve, one of each policy -> metrics
    evaluate: Callable[[Sequence[Version]], Awaitable[Metrics]] | None = None
    # (steps done, next admission id) -> once the state is copied, the coroutine that writes it while training goes on
    checkpoint: Callable[[int, int], Awaitable[Coroutine[Any, Any, None]]] | None = None
    # raises PolicyMismatch, before the update, if engines and trainer disagree on what the present version sampled
    agree: Callable[[Version, Sequence[Group], Sequence[Sample], Sequence[Array]], Awaitable[None]] | None = None
    probe: Callable[[Version, Sequence[Sample], Sequence[Array]], Awaitable[None]] | None = None
    ends: Callable[[], Coroutine[Any, Any, NoReturn]] | None = None  # raises PeerLost when the trainer's process ends
    # (why the trainer is lost, steps done) -> once a new one has their weights: its incarnation, step of its checkpoint
    restart: Callable[[PeerLost, int], Awaitable[tuple[int, int]]] | None = None  # None: a lost trainer ends the run
    served: Callable[[Sequence[Version]], Awaitable[None]] = nothing  # with what engines serve, before slots are released
