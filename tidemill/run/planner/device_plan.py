"""Device plan: the CUDA device of each rank of the trainer and of each engine. No torch.

Devices have the numbers by which this process sees them, so CUDA_VISIBLE_DEVICES is respected. A started role sees its own
device alone. What a recipe gives is kept: `placement.devices`, a device that trainer.device names, and the numbers
trainer.ranks and placement.engines. A number is given when the recipe has its key, whatever the value. The split rule
decides the rest. One device is shared by all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

from tidemill.core.errors import ConfigError
from tidemill.run.recipe import RunConfig
from tidemill.trainer.trainer_kinds import AdamWSettings

RoleName = Literal["trainer", "engines"]
TRAINER: RoleName = "trainer"
ENGINES: RoleName = "engines"
COUNTS: dict[RoleName, str] = {TRAINER: "trainer.ranks", ENGINES: "placement.engines"}
ONE: dict[RoleName, str] = {TRAINER: "rank of the trainer", ENGINES: "engine"}
VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA = re.compile(r"auto|cuda(?::(\d{1,4}))?")  # devices that may be a CUDA device, and its number


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The devices of a run's processes, cuda:N as this process counts; "": as the role's settings say."""

    trainer: tuple[str, ...]  # of each rank
    engines: tuple[str, ...]
    reference: tuple[str, ...] = ()  # of the engines that serve the reference
    shared: bool = False  # trainer and engines have a CUDA device in common
    why: str = ""  # "": there was nothing to decide

    @property
    def placed(self) -> bool:
        return any(self.trainer + self.engines)

    def metrics(self) -> dict[str, float]:
        """Devices of each role, for the record of a step: see `device_rates.measured`."""
        return {"devices/train": len({*self.trainer}), "devices/sample": len({*self.engines})} if self.placed else {}

    def said(self) -> str:
        """The plan in words; "" if there was nothing to decide."""
        does = [("train", "", self.trainer), ("sample", "", self.engines), ("serve", " the reference", self.reference)]
        said = [f"{in_a_row(each)} {verb}{'s' if len(each) == 1 else ''}{what}" for verb, what, each in does if each]
        return f"{', '.join(said)}: {self.why}" if self.why else ""

    def of(self, role: str, name: str) -> str:
        """The device of an engine by its name, ROLE-N; engines that join beyond the planned ones share devices."""
        devices = self.reference if role == "reference" else self.engines
        return devices[int(name.rpartition("-")[2]) % len(devices)]


@dataclass(frozen=True, slots=True)
class Given:
    """Numbers of processes that a recipe gives; None: it leaves them to the split rule."""

    ranks: int | None
    engines: int | None

    def of(self, role: RoleName) -> int | None:
        return self.ranks if role == TRAINER else self.engines


Rule = Callable[[int, Given], tuple[int, int, str]]
"""How many of so many devices train and how many sample, and why. Given numbers are kept."""


def in_a_row(devices: Sequence[str]) -> str:
    """Devices as people list them: those with consecutive numbers by the first and the last."""
    numbers = [int(each.partition(":")[2] or 0) for each in devices]
    if len(devices) > 2 and numbers == [*range(numbers[0], numbers[0] + len(devices))]:
        return f"{devices[0]} to {devices[-1]}"
    return " and ".join(filter(None, [", ".join(devices[:-1]), devices[-1]]))


def given_in(config: RunConfig) -> Given:
    """The numbers whose keys the recipe has. Read them from the recipe itself: a copy that travelled has every key."""
    trainer, placement = config.trainer, config.placement
    free = isinstance(trainer, AdamWSettings) and "ranks" not in trainer.model_fields_set  # others may have no ranks
    free = free and not config.policies  # which one process trains
    return Given(None if free else trainer.ranks, placement.engines if "engines" in placement.model_fields_set else None)


def as_configured(config: RunConfig) -> DevicePlan:
    """The plan where nothing is placed: each role goes where its settings say."""
    placement = config.placement
    return DevicePlan(("",) * config.trainer.ranks, ("",) * placement.engines, ("",) * placement.reference_engines)


def resolved(config: RunConfig, plan: DevicePlan) -> RunConfig:
    """The recipe with a plan's numbers; a role that is placed uses the one device that it sees."""
    if not plan.placed:
        return config
    training, sampling = ({"device": "cuda"} if devices[0] else {} for devices in (plan.trainer, plan.engines))
    changed = {
        "placement": config.placement.model_copy(update={"engines": len(plan.engines)}),
        "trainer": config.trainer.model_copy(update={"ranks": len(plan.trainer), **training}),
        "engine": config.engine.model_copy(update=sampling),
    }
    return config.model_copy(update=changed)


def place(config: RunConfig, given: Given, visible: int, rule: Rule) -> DevicePlan:
    """The device plan for so many visible CUDA devices. Raises ConfigError for what does not go together."""
    uses: list[RoleName] = [role for role in COUNTS if visible and CUDA.fullmatch(_device(config, role))]
    if not config.placement.processes:
        if config.placement.devices != "auto":
            raise ConfigError(
                "placement.devices is for placement.kind = 'local', where each role has a process, and placement.kind = "
                f"{config.placement.kind_name!r} was given: leave placement.devices out"
            )
        return replace(as_configured(config), shared=len(uses) == 2)
    fixed: dict[RoleName, tuple[int, ...]] = {
        role: numbers for role in COUNTS if (numbers := _fixed(config, role, given, visible))
    }
    rest, chosen, why = as_configured(config), dict[RoleName, tuple[int, ...]](), ""
    if len(uses) == 2:
        chosen, why = _both(config, given, fixed, visible, rule)
    elif uses:
        (role,) = uses
        counts = {TRAINER: given.ranks or 1, ENGINES: given.engines or 1}
        chosen = fixed or {role: _first(role, counts[role], visible)}
    spare = [n for n in range(visible) if all(n not in numbers for numbers in chosen.values())]
    serving = spare or chosen.get(ENGINES, ()) if ENGINES in chosen else ()
    trainer, engines = (_names(chosen[role]) if role in chosen else getattr(rest, role) for role in COUNTS)
    reference = islice(cycle(_names(serving) or ("",)), config.placement.reference_engines)
    return DevicePlan(trainer, engines, (*reference,), bool({*trainer} & {*engines} - {""}), why)


def _both(
    config: RunConfig, given: Given, fixed: Mapping[RoleName, tuple[int, ...]], visible: int, rule: Rule
) -> tuple[dict[RoleName, tuple[int, ...]], str]:
    """The devices of trainer and engines, and why."""
    if len(fixed) == 2:
        return {**fixed}, "as the recipe names them"
    if visible == 1:
        return {role: fixed.get(role) or _first(role, given.of(role) or 1, 1) for role in COUNTS}, "all share the only one"
    if fixed:
        ((role, numbers),) = fixed.items()
        other = ENGINES if role == TRAINER else TRAINER
        left = [n for n in range(visible) if n not in numbers]
        count = given.of(other) or len(left)
        if not 0 < count <= len(left):
            asked = f"{COUNTS[other]} = {count}: " if count else ""
            raise ConfigError(
                f"{asked}{_said(config, role)} leaves {len(left)} devices to the {other}, as {_seen(visible)}: leave more, "
                f"or name theirs in placement.devices.{other}"
            )
        return {**fixed, other: (*left[:count],)}, f"{_said(config, role)}, and the {other} have the rest"
    needed = sum(given.of(role) or 1 for role in COUNTS)
    if needed > visible:
        said = " and ".join(f"{COUNTS[role]} = {given.of(role)}" for role in COUNTS if given.of(role))
        raise ConfigError(
            f"{said}: {needed} devices are needed, one for each rank of the trainer and for each engine, and "
            f"{_seen(visible)}: give lower numbers, or leave them out"
        )
    train, sample, why = rule(max(needed, visible - config.placement.reference_engines), given)
    return {TRAINER: (*range(train),), ENGINES: (*range(train, train + sample),)}, why


def _fixed(config: RunConfig, role: RoleName, given: Given, visible: int) -> tuple[int, ...] | None:
    """The devices that the recipe names for a role. Raises ConfigError if they contradict something."""
    named = () if config.placement.devices == "auto" else config.placement.devices.get(role, ())
    on_cuda = CUDA.fullmatch(device := _device(config, role))
    own = (int(on_cuda[1]),) if on_cuda and on_cuda[1] else ()
    said, count = _said(config, role), given.of(role)
    if named and (not on_cuda or own not in ((), named)):
        raise ConfigError(f"{said} does not go with {_table(role)}.device = {device!r}: leave one of them out")
    if named and not visible:
        raise ConfigError(f"{said}: {_seen(visible)}: leave placement.devices out, or start where there are some")
    if not (found := named or own) or not visible:
        return None
    if max(found) >= visible:
        raise ConfigError(f"{said}: {_seen(visible)}, counted from 0 to {visible - 1}: name one of those")
    if count not in (None, len(found)):
        raise ConfigError(
            f"{said} does not go with {COUNTS[role]} = {count}: name one device for each {ONE[role]}, or leave out "
            f"{COUNTS[role]}"
        )
    return found


def _first(role: RoleName, count: int, visible: int) -> tuple[int, ...]:
    """The first devices for a role that need not leave any; engines may share an only one."""
    if role == ENGINES and visible == 1:
        return (0,) * count
    if count > visible:
        raise ConfigError(
            f"{COUNTS[role]} = {count}: each {ONE[role]} has a device of its own, and {_seen(visible)}: give a lower number"
        )
    return (*range(count),)


def _table(role: RoleName) -> str:
    return "trainer" if role == TRAINER else "engine"


def _device(config: RunConfig, role: RoleName) -> str:
    return config.trainer.device if role == TRAINER else config.engine.device


def _said(config: RunConfig, role: RoleName) -> str:
    """The key by which the recipe names a role's devices, with its value."""
    named = () if config.placement.devices == "auto" else config.placement.devices.get(role, ())
    return f"placement.devices.{role} = {[*named]}" if named else f"{_table(role)}.device = {_device(config, role)!r}"


def _seen(visible: int) -> str:
    """The number of visible devices in words, and which ones they are of the machine's if not all."""
    which = os.environ.get(VISIBLE)
    count = {0: "no CUDA device is", 1: "1 CUDA device is"}.get(visible, f"{visible} CUDA devices are")
    return f"{count} visible here{'' if which is None else f' ({VISIBLE} = {which})'}"


def _names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"cuda:{n}" for n in numbers)
