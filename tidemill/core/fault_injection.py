"""Fault injection: a test makes a process die, freeze or fail at a named place.

    TIDEMILL_FAULTS = "trainer:save:4:torn-write engine-0:generate:7:kill"     role:phase:step:kind[:argument]

role: "engine" (any of them), "engine-1", "reference" (the engine that serves it), "trainer", "controller", "reward",
"environment". phase: a word that the code passes to `reach`. step: a number that the code passes too, or * for the first
time it gets there. Each fault happens once in a run, however many processes the run takes: it is appended to the file
TIDEMILL_FAULT_LOG before it happens, and a fault listed there does not happen again. The file thus proves that it
happened. While the variable is empty, nothing is looked up and nothing is slower.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

Kind = Literal["kill", "kill-all", "stop", "raise", "disk-full", "torn-write", "slow"]
VARIABLE, LOG_VARIABLE = "TIDEMILL_FAULTS", "TIDEMILL_FAULT_LOG"
SLOW_S = 1.0


class FaultError(RuntimeError):
    """The exception that a fault of kind "raise" raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    role: str
    phase: str
    step: int | None  # None: the first time
    kind: Kind
    argument: float | None = None  # slow: seconds

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that `text` describes. Raises ValueError if it has another form."""
        role, _, rest = text.partition(":")
        phase, step, kind, *argument = [*rest.split(":"), "", "", ""][: max(3, rest.count(":") + 1)]
        if not role or not phase or not (step == "*" or step.isdigit()) or kind not in get_args(Kind) or len(argument) > 1:
            raise ValueError(f"fault {text!r}: expected role:phase:step:kind with a kind of {', '.join(get_args(Kind))}")
        seconds = float(argument[0]) if argument else None
        return cls(role, phase, None if step == "*" else int(step), cast(Kind, kind), seconds)

    def __str__(self) -> str:
        end = "" if self.argument is None else f":{self.argument:g}"
        return f"{self.role}:{self.phase}:{'*' if self.step is None else self.step}:{self.kind}{end}"


class Faults:
    def __init__(self, faults: list[Fault], log: Path | None, controller: int) -> None:
        """log: where faults are noted as they happen. controller: the process that "kill-all" ends first."""
        if faults and log is None:
            raise ValueError(f"{VARIABLE} is set, {LOG_VARIABLE} is not: give the file that faults are noted in")
        self.faults, self.controller, self._log = faults, controller, log

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Faults:
        log = environment.get(LOG_VARIABLE)
        return cls([Fault.parse(t) for t in environment.get(VARIABLE, "").split()], Path(log) if log else None, os.getpid())

    def reach(self, role: str, phase: str, step: int, path: Path | None) -> None:
        for fault in self.faults:
            here = phase == fault.phase and fault.role in (role, role.partition("-")[0]) and fault.step in (None, step)
            if here and self._first(fault):
                self._happen(fault, path)

    def _first(self, fault: Fault) -> bool:
        assert self._log is not None
        if self._log.exists() and str(fault) in self._log.read_text().split():
            return False
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{fault}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True

    def _happen(self, fault: Fault, path: Path | None) -> None:
        match fault.kind:
            case "raise":
                raise FaultError(f"a fault on purpose: {fault}")
            case "disk-full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path or ""))
            case "slow":
                time.sleep(SLOW_S if fault.argument is None else fault.argument)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "torn-write" if path is not None:
                os.truncate(path, path.stat().st_size // 2)
                self._kill_all()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill-all" | "torn-write":
                self._kill_all()

    def _kill_all(self) -> None:
        if self.controller != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.controller, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


_armed = Faults.from_environment(os.environ)


def reach(role: str, phase: str, step: int = 0, path: Path | None = None) -> None:
    """Announce `phase`, and let its faults happen. path: the file just written, for a torn write."""
    if _armed.faults:
        _armed.reach(role, phase, step, path)


def arm(environment: Mapping[str, str]) -> None:
    """Replace the armed faults by those of `environment`, as a forked process must do."""
    global _armed
    _armed = Faults.from_environment(environment)


def belong_to(controller: int) -> None:
    """Name the process of the controller, which "kill-all" ends first."""
    _armed.controller = controller
