"""Weight updates: handles to the weights of one version, which a trainer publishes and engines stage.

A handle is small enough to send anywhere. Its parts say where the bytes are: one for each process that wrote some.

    stored    the bytes lie there when the handle is published; engines read them when they like
    live      the handle announces them; the trainer sends while the engines receive, by a rendezvous of all of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tidemill.core.errors import BaseMissing
from tidemill.core.types import Version

UpdateKind = Literal["full", "delta", "adapter"]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights that one process wrote to one place."""

    transport: str  # that wrote them, and reads them
    location: str  # shared-memory segment name or folder
    bytes: int = 0
    whole: int = 0  # bytes that a full version of the same weights has
    live: bool = False  # nothing is written: its process sends while engines receive


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The processes that meet to exchange live weights, and the limit of the exchange.

    Every one that sends (a part each) is rank 0 of a process group; those that receive are ranks 1 to `receivers` of it.
    """

    group: str  # names the process groups: the same name as long as the same processes meet, and none has failed
    first: int  # rank of the engine's first receiving process
    receivers: int
    limit_s: float

    def __post_init__(self) -> None:
        if not (1 <= self.first <= self.receivers and 0 < self.limit_s < float("inf")):
            raise ValueError(f"{self}: expected a rank from 1 to {self.receivers}, and a limit in seconds")


@dataclass(frozen=True, slots=True)
class AddedTo:
    """The weights that the slices of an update are added to: by a delta to what is served, by an adapter to its base."""

    base: Version  # with its fingerprint
    kind: Literal["delta", "adapter"]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The weights of one version: those of its parts together, applied to `base` unless the kind is "full"."""

    version: Version  # after the update, with the fingerprint of all weights that are then served
    parts: tuple[WeightPart, ...]
    kind: UpdateKind = "full"
    # delta: the version that must be served before. adapter: the frozen weights that it is added to. None: any.
    base: Version | None = None
    rendezvous: Rendezvous | None = None  # of a live update, as it is given to one engine, and to the trainer to send
    followed: bool = False  # changes may follow: a receiver that is not given the served tensors keeps copies
    note: str = ""  # why these are the weights of the version before, though there was an update

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"{self.version}: a weight update has no part, expected at least 1")
        if (self.base is None) != (self.kind == "full"):
            given, expected = ("no base", "one") if self.base is None else (f"the base {self.base}", "none")
            raise ValueError(f"{self.version}: a weight update of kind {self.kind!r} has {given}, expected {expected}")

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def whole(self) -> int:
        """Bytes of a full version of these weights."""
        return sum(part.whole for part in self.parts)

    @property
    def live(self) -> bool:
        """True if the trainer must send it while engines receive."""
        return any(part.live for part in self.parts)

    def for_process(self, number: int) -> WeightUpdate:
        """The update as the engine's receiving process of this number, from 0, takes it."""
        if self.rendezvous is None:
            return self
        return replace(self, rendezvous=replace(self.rendezvous, first=self.rendezvous.first + number))


@dataclass(frozen=True, slots=True)
class UpdateSupport:
    """The weight updates that an engine or a transport takes."""

    kinds: tuple[UpdateKind, ...] = ("full",)
    several_parts: bool = False

    def both(self, other: UpdateSupport) -> UpdateSupport:
        """The updates that an engine takes through a transport."""
        kinds: list[UpdateKind] = [kind for kind in self.kinds if kind in other.kinds]
        return UpdateSupport(tuple(kinds), self.several_parts and other.several_parts)

    def check(self, update: WeightUpdate, name: str, served: Version | None = None) -> None:
        """Raise ValueError for an update that `name` cannot take, BaseMissing if it does not fit `served`."""
        if update.kind not in self.kinds:
            taken = " or ".join(repr(kind) for kind in self.kinds) or "no kind"
            raise ValueError(f"{name} takes weight updates of kind {taken}, but {update.version} is of kind {update.kind!r}")
        if len(update.parts) > 1 and not self.several_parts:
            raise ValueError(f"{name} takes weight updates in 1 part, but {update.version} has {len(update.parts)}")
        if update.kind == "delta" and served is not None and update.base != served:
            raise BaseMissing(
                f"{update.version} applies to {update.base and update.base.exact}, but {name} serves {served.exact}"
            )
