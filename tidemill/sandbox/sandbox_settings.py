"""Settings of a sandbox: how programs are isolated, and their limits.

A dataclass and no `Config`: reward workers, of which there are many, load it without pydantic.
"""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from tidemill.core.errors import ConfigError
from tidemill.sandbox.bridge import address_of

Level = Literal["auto", "bubblewrap", "landlock", "limits"]
LEVELS = ("bubblewrap", "landlock")  # what "auto" tries, the stronger first
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Level and limits of a sandbox. Raises ConfigError for values that cannot be meant."""

    level: Level = "auto"  # "limits" isolates nothing; "auto" never chooses it
    seconds: float = 10.0  # from the start of a program to its end
    cpu_seconds: int = 5  # of each of its processes
    memory_mb: int = 512  # of all its processes together, and the address space of each
    disk_mb: int = 64  # files in its folder, in all and each
    processes: int = 32  # with their threads
    open_files: int = 128
    output_kb: int = 1024  # of stdout, and of stderr
    at_once: int = 16  # programs that run at a time; others wait
    warm: int = 2  # sandboxes that are started ahead, so that a program begins at once
    network: str = ""  # "HOST:PORT": the one address that can be reached, as 127.0.0.1:PORT. Empty: none
    python: str = ""  # interpreter of the programs. Empty: this one, or another that a program's user can reach
    packages: tuple[str, ...] = ()  # folders that Python programs import from
    readable: tuple[str, ...] = ()  # further files and folders that programs can read

    def __post_init__(self) -> None:
        if self.level not in typing.get_args(Level):
            raise ConfigError(f"sandbox level {self.level!r}: expected one of {', '.join(typing.get_args(Level))}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
            if not number or value < least or (name not in FRACTIONAL and value != int(value)):
                raise ConfigError(f"sandbox {name} = {value!r}: expected a number of at least {least}")
        if self.network:
            address_of(self.network)
        for name in ("packages", "readable"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if missing := [path for path in getattr(self, name) if not os.path.isabs(path) or not os.path.exists(path)]:
                raise ConfigError(f"sandbox {name}: {missing[0]!r} is not the absolute path of something that exists")

    @classmethod
    def from_options(cls, options: typing.Mapping[str, typing.Any]) -> SandboxSettings:
        """Settings from a table. Raises ConfigError for a name that is none of theirs."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(f"sandbox has no setting {unknown[0]!r}: it has {', '.join(known)}")
        return cls(**options)

    def limits(self) -> dict[str, int | float]:
        """The limits as the supervisor takes them, in bytes and seconds."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": int(self.cpu_seconds),
            "memory": int(self.memory_mb) * MB,
            "disk": int(self.disk_mb) * MB,
            "files": 64 * int(self.disk_mb) + 256,  # so many that each costs the kernel no more than its share
            "processes": int(self.processes),
            "open_files": int(self.open_files),
            "output": int(self.output_kb) * 1024,
        }


FRACTIONAL = ("seconds",)
LEAST = {"seconds": 0.05, "cpu_seconds": 1, "memory_mb": 64, "disk_mb": 1, "processes": 1, "open_files": 16}
LEAST |= {"output_kb": 1, "at_once": 1, "warm": 0}
