"""Check of a run's memory before it starts: what cannot fit is refused, with the settings that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.engine.native.cache_size import device_of
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.models.architecture import Architecture
from tidemill.run.planner.device_plan import ENGINES, TRAINER, DevicePlan
from tidemill.run.planner.memory_model import Models, Process, demands, in_words, processes
from tidemill.run.recipe import RunConfig
from tidemill.trainer.trainer_kinds import TrainerSettings

ONE_MACHINE = "This machine is the end: a run on several does not exist yet"
LEAST_TOKENS = 512  # of a micro-batch that is proposed
MOST = 3  # proposals

Change = tuple[str, str, dict[str, Any]]  # in words, the table, the values


@dataclass(frozen=True, slots=True)
class MemoryRefusal:
    """The reason why a run cannot fit, and the settings that would help, the best first."""

    too_large: str
    helps: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()  # each of these would be enough

    def __str__(self) -> str:
        enough = f". It would fit with {'; or with '.join(self.fits)}" if self.fits else ""
        first = f". What takes the most first: {'; '.join(self.helps)}. {ONE_MACHINE}" if self.helps else ""
        return f"{self.too_large}{enough}{first}"


def check_memory(config: RunConfig, policy: Architecture, longest: int = 0, devices: DevicePlan | None = None) -> None:
    """Raise ConfigError, with advice, if a run needs more than is free on a device."""
    if why := advised(config, Models.of(config, policy), longest, devices):
        raise ConfigError(str(why))


def advised(config: RunConfig, models: Models, longest: int = 0, devices: DevicePlan | None = None) -> MemoryRefusal | None:
    """The reason why a run does not fit, with the settings that would make it fit; None if it does."""
    why = refusal(processes(config, models, longest, devices))
    if why is None or not why.helps:
        return why

    def fits(changes: Sequence[Change]) -> bool:
        return refusal(processes(changed(config, changes), models, longest, devices)) is None

    return replace(why, fits=tuple(_enough(list(_changes(config, fits)), fits))[:MOST])


def changed(config: RunConfig, changes: Sequence[Change]) -> RunConfig:
    for _, table, values in changes:
        config = config.model_copy(update={table: getattr(config, table).model_copy(update=values)})
    return config


def _enough(known: list[Change], fits: Any) -> Iterator[str]:
    """Changes that are enough, in words: each that is so alone, else the fewest of all of them."""
    alone = [change for change in known if fits([change])]
    if not alone and fits(known):
        for change in reversed(known):
            if fits(rest := [each for each in known if each is not change]):
                known = rest
        yield " and ".join(text for text, *_ in known)
    yield from (text for text, *_ in alone)


def _changes(config: RunConfig, fits: Any) -> Iterator[Change]:
    """Changes that may save memory, those that change no result first."""
    trainer, engine, placement = config.trainer, config.engine, config.placement
    if isinstance(trainer, TrainerSettings):
        if trainer.moments_on == "device" and device_of(trainer.device) != "cpu":
            yield "trainer.moments_on = 'host'", "trainer", {"moments_on": "host"}
        if trainer.checkpointing < 1:
            yield "trainer.checkpointing = true", "trainer", {"checkpointing": True}
    if placement.share != "sleep" and placement.stream is not True:
        yield "placement.share = 'sleep'", "placement", {"share": "sleep"}
    halves = [trainer.micro_batch_tokens >> n for n in range(1, 32)]
    if smaller := [*takewhile(lambda tokens: tokens >= LEAST_TOKENS, halves)]:
        of = [(f"trainer.micro_batch_tokens = {n}", "trainer", {"micro_batch_tokens": n}) for n in smaller]
        yield next((each for each in of if fits([each])), of[-1])
    if isinstance(engine, EngineSettings) and engine.dtype == "float32" and not engine.batch_invariant:
        yield "engine.dtype = 'bfloat16'", "engine", {"dtype": "bfloat16"}
    if isinstance(trainer, TrainerSettings) and trainer.moments == "float32":
        yield "trainer.moments = 'int8'", "trainer", {"moments": "int8"}


def refusal(found: Sequence[Process]) -> MemoryRefusal | None:
    """The first reason why these processes do not fit, or None."""
    for device, demand in demands(found).items():
        if demand.free is None:
            names = " and ".join(p.name for p in found if device in p.devices)
            return MemoryRefusal(
                f"{names} on {device!r}: no such device is visible here; set trainer.device and engine.device to 'auto', "
                "which takes what there is, or to 'cpu'"
            )
        if demand.needed <= demand.free:
            continue
        fuller = _fuller_turn(found, device)
        parts = [(p.devices.count(device), p, h) for p in found if device in p.devices for h in p.held if not h.lazy]
        parts = [part for part in parts if part[2].turn in ("", fuller)]
        parts.sort(key=lambda part: -part[0] * part[2].bytes)
        count, process, most = parts[0]
        levers = [h.lever for _, _, h in parts if h.lever]
        return MemoryRefusal(
            f"this recipe needs {in_words(demand.needed)} of memory on {device}, and {in_words(demand.free)} is free; the "
            f"most is {in_words(count * most.bytes)} of {_owner(process, count)}: {most.what}",
            tuple([*dict.fromkeys(levers)][:MOST]),
        )
    return None


def _fuller_turn(found: Sequence[Process], device: str) -> str:
    """The turn that takes more of a device."""

    def size(turn: str) -> int:
        return sum(p.devices.count(device) * h.bytes for p in found for h in p.held if h.turn == turn and not h.lazy)

    return max((TRAINER, ENGINES), key=size)


def _owner(process: Process, count: int) -> str:
    return f"the {process.name}" if count == 1 else f"{count:,} {process.name}s"
