"""Escape suite: every attempt in a sandbox, and what came of it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tidemill.core.errors import SandboxFailed
from tidemill.sandbox.escapes import (
    escape_tools,
    file_escapes,
    kernel_escapes,
    network_escapes,
    process_escapes,
    resource_escapes,
)
from tidemill.sandbox.escapes.stage import EscapeStage, staged
from tidemill.sandbox.execution import SandboxedProgram
from tidemill.sandbox.sandbox_pool import Sandbox
from tidemill.sandbox.sandbox_settings import Level, SandboxSettings

MODULES = (process_escapes, kernel_escapes, network_escapes, file_escapes, resource_escapes)
HOLDER = "import os; open('of-another-execution', 'w').write({secret!r}); os.write(3, b'x'); os.read(3, 1)"
LIMITS = {"seconds": 5.0, "cpu_seconds": 2, "memory_mb": 128, "disk_mb": 8, "processes": 16, "output_kb": 64}


@dataclass(frozen=True, slots=True)
class EscapeAttempt:
    """One way out that is tried."""

    module: str
    name: str
    aim: str  # a sentence
    harmful: bool  # without a sandbox it would hurt, or not end


@dataclass(frozen=True, slots=True)
class EscapeFinding:
    """Result of an attempt."""

    attempt: EscapeAttempt
    escaped: bool
    said: str


def attempts() -> list[EscapeAttempt]:
    """All attempts of the suite."""
    return [
        EscapeAttempt(module.__name__, name, (function.__doc__ or "").partition("\n")[0], name in escape_tools.HARMFUL)
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]


def small_limits(level: Level, at_once: int = 2) -> SandboxSettings:
    """Settings in which an attempt at a limit ends soon."""
    return SandboxSettings(level=level, at_once=at_once, **LIMITS)


async def run_suite(sandbox: Sandbox, chosen: Sequence[EscapeAttempt] | None = None) -> list[EscapeFinding]:
    """Make the attempts, all unless some are chosen, in an open sandbox. Those on one process are made in turn."""
    async with staged(sandbox.settings) as stage:
        turns: dict[str, list[EscapeAttempt]] = {}
        for attempt in attempts() if chosen is None else chosen:
            turns.setdefault("in turn" if attempt.module == process_escapes.__name__ else attempt.name, []).append(attempt)
        found = await asyncio.gather(*(_in_turn(sandbox, stage, each) for each in turns.values()))
    return [finding for each in found for finding in each]


async def _in_turn(sandbox: Sandbox, stage: EscapeStage, chosen: Sequence[EscapeAttempt]) -> list[EscapeFinding]:
    return [await tried(sandbox, stage, attempt) for attempt in chosen]


async def tried(sandbox: Sandbox, stage: EscapeStage, attempt: EscapeAttempt) -> EscapeFinding:
    """Make one attempt in the sandbox."""
    await stage.start_victim()
    stdin = json.dumps(stage.facts).encode()
    try:
        if attempt.name == "another_execution":
            holder = SandboxedProgram(HOLDER.format(secret=stage.facts["secret"]))
            made = program_of(attempt, before="import os; os.read(3, 1)")
            execution = await sandbox.run_pair(made, holder, stdin)
        else:
            execution = await sandbox.run(program_of(attempt), stdin)
    except SandboxFailed as error:
        return EscapeFinding(attempt, True, f"it broke the sandbox: {error}")
    said = (execution.stdout[:300] + execution.stderr[-200:]).decode(errors="replace").strip()
    if escape_tools.MARK in said:
        return EscapeFinding(attempt, True, said)
    if not stage.victim_lives:
        return EscapeFinding(attempt, True, "a process outside was ended")
    if attempt.name.startswith("daemon") and stage.daemon_lives():
        return EscapeFinding(attempt, True, "a process was left behind")
    return EscapeFinding(attempt, False, f"{execution.describe()}; {said}")


def program_of(attempt: EscapeAttempt, before: str = "") -> SandboxedProgram:
    """The program that makes an attempt. before: a line that it begins with."""
    begin = f"{before}\n" if before else ""
    source = f"{begin}from {escape_tools.__name__} import attempt\nfrom {attempt.module} import {attempt.name}\n"
    named = next(module for module in MODULES if module.__name__ == attempt.module)
    files = dict(_file(module) for module in (escape_tools, named))
    return SandboxedProgram(f"{source}attempt({attempt.name})\n", files=files)


def _file(module: ModuleType) -> tuple[str, bytes]:
    assert module.__file__ is not None
    return module.__name__.replace(".", "/") + ".py", Path(module.__file__).read_bytes()
