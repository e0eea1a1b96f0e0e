"""Registry of placement kinds, with the settings and inputs that all kinds share.

A kind is a subclass of `BasePlacementSettings`, a builder `(settings, PlacementSetup) -> Placement`, and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tidemill.core.registry import KindSettings, Registry
from tidemill.envs.environment_settings import EnvironmentWorkers
from tidemill.runtime.local import Local
from tidemill.runtime.placement import Factory, Inline, Liveness, Placement
from tidemill.weight_sync.sync_settings import BaseSyncSettings, SyncSettings

_SETTINGS = "tidemill.run.placement_kinds:PlacementSettings"
PLACEMENTS = Registry("placement.kind")
PLACEMENTS.register("local", _SETTINGS, "tidemill.run.placement_kinds:local")
PLACEMENTS.register("inline", _SETTINGS, "tidemill.run.placement_kinds:inline")


class BasePlacementSettings(KindSettings, registry=PLACEMENTS):
    """Processes of a run, their threads, and the transport of weights, for any placement."""

    engines: int = Field(
        default=1, ge=1, description="Rollout engines. Left out on several CUDA devices: one on each that does not train"
    )
    devices: Literal["auto"] | dict[Literal["trainer", "engines"], tuple[int, ...]] = Field(
        default="auto",
        description="CUDA devices of each role, by number among those visible: { trainer = [0], engines = [1, 2] }. auto: "
        "as many as placement.engines and trainer.ranks say, and what these leave out as the split rule says",
    )
    engine_threads: int = Field(
        default=1, ge=1, description="CPU threads of each engine. If there are more in all than cores, they share the cores"
    )
    trainer_threads: int = Field(
        default=1, ge=1, description="CPU threads of the trainer, of each of its ranks; fewer while engines compute"
    )
    stream: bool | Literal["auto"] = Field(
        default="auto",
        description="Begin a step with the groups that have finished, where the algorithm allows it. "
        "auto: if trainer and engines have a core for each thread, or different devices",
    )
    share: Literal["auto", "sleep", "beside"] = Field(
        default="auto",
        description="Use of a device that trainer and engines share. sleep: they take turns, and each gives its memory back "
        "meanwhile; beside: they compute at the same time. auto: sleep on one GPU, beside on CPUs",
    )
    reference_engines: int = Field(default=0, ge=0, description="Engines that serve the reference. 0: the trainer holds it")
    sync: BaseSyncSettings = SyncSettings()
    environment: EnvironmentWorkers = EnvironmentWorkers()

    @field_validator("devices", mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        """Refuse in one sentence what is neither "auto" nor lists of different numbers."""
        tables = given if isinstance(given, dict) else {"": ()}
        lists = [each for each in tables.values() if isinstance(each, list | tuple)]
        plain = all(type(n) is int and n >= 0 for each in lists for n in each)
        if given != "auto" and not (tables.keys() <= {"trainer", "engines"} and len(lists) == len(tables) and plain):
            raise ValueError(
                f"{given!r} was given, and 'auto' or {{ trainer = [0], engines = [1, 2] }}, numbers of visible CUDA devices "
                "from 0 on, was expected"
            )
        for role, numbers in tables.items() if given != "auto" else ():
            if not numbers or len(set(numbers)) < len(numbers):
                raise ValueError(
                    f"{role} = {[*numbers]} names {'a device twice' if numbers else 'none'}: name one for each "
                    f"{'engine' if role == 'engines' else 'rank of the trainer'}, or leave {role} out"
                )
        return given

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if self.share == "sleep" and self.stream is True:
            raise ValueError(
                "stream = true with share = 'sleep': the trainer cannot begin while engines sample, because they take turns "
                "on the device; leave out one of them"
            )
        return self

    @property
    def processes(self) -> bool:
        """True when each role has a process of its own on this machine."""
        return False


class PlacementSettings(BasePlacementSettings):
    """Placement on this machine: a process for each role, or one process for all."""

    kind: Literal["local", "inline"] = Field(
        default="local",
        description="Place of each role. local: a process of its own on this machine; inline: everything in one process",
    )

    @property
    def processes(self) -> bool:
        return self.kind == "local"


@dataclass(frozen=True, slots=True)
class PlacementSetup:
    """Inputs of a placement's builder besides its settings."""

    build: Factory  # makes a role from its spec in this process; in others `role_main` does
    logs: Path
    liveness: Liveness
    start_deadline: float  # seconds for a role to start


def local(settings: BasePlacementSettings, setup: PlacementSetup) -> Placement:
    return Local(setup.logs, start_deadline=setup.start_deadline, liveness=setup.liveness)


def inline(settings: BasePlacementSettings, setup: PlacementSetup) -> Placement:
    return Inline(setup.build)
