"""Chaos test: kills, freezes and starves a run's parts, then counts what was lost.

kill      SIGKILL to an engine, the trainer, a worker, the fork server, or the controller, which is then started again
freeze    SIGSTOP until the run has noticed by itself and killed it; the controller continues after some seconds
starve    stopped nine tenths of the time for some seconds: slow, which must not be taken for dead
disk      the controller is killed, and the first checkpoint after that finds the disk full (`core.fault_injection`)

Nothing here reaches into the run: it only gets signals and environment variables, as from any failing system.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from tidemill.cli.process_lives import STARTING, Life, Look, RunSize
from tidemill.core.errors import ConfigError
from tidemill.core.fault_injection import LOG_VARIABLE, VARIABLE
from tidemill.ledger.database import has_ledger
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.recipe import RunConfig
from tidemill.run.status_file import STATUS
from tidemill.run.storage.run_files import read_json
from tidemill.runtime.local import MODULE
from tidemill.runtime.workers.guard import KEEPER

WORKERS = {
    "tidemill.envs.reward_workers.reward_worker": "reward",
    "tidemill.envs.episode_worker": "environment",
}  # by module
FORKSERVER = "forkserver"
STARVED_S, FROZEN_S, DUTY_S, RUN_SHARE = 5.0, 3.0, 0.2, 0.1
STOP_S = 120.0  # deadline of the run's end after it was asked to stop
TICK_S, LOOK_S = 0.25, 2.0  # seconds between looks at the run, and at the sizes of its processes
ROUGH_S = 300.0  # seconds of faults between two calm periods

Schedule = tuple[tuple[str, str, float], ...]
FAULTS: Schedule = (  # fault, role, relative frequency
    ("kill", "engine", 4),
    ("kill", "trainer", 3),
    ("kill", "reward", 3),
    ("kill", "environment", 3),
    ("kill", "controller", 1),
    ("kill", "forkserver", 1),
    ("freeze", "engine", 3),
    ("freeze", "trainer", 2),
    ("freeze", "reward", 2),
    ("freeze", "environment", 2),
    ("freeze", "controller", 1),
    ("starve", "engine", 2),
    ("starve", "trainer", 2),
    ("disk", "controller", 1),
)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault that was done to a process, and how long the run took to recover."""

    at: float  # seconds since the drill began
    what: str
    whom: str  # the process
    recovered_s: float | None = None  # seconds until the next step ended; None: not before the next fault


@dataclass(slots=True)
class Outcome:
    """The result of a drill."""

    seconds: float = 0.0
    calm_s: float = 0.0
    faults: list[PlannedFault] = field(default_factory=list)
    starts: int = 0  # of the controller
    statuses: list[int] = field(default_factory=list)  # exit statuses of the controller, in order
    calm_rate: float = 0.0  # trained groups a second in calm whiles
    rate: float = 0.0  # and in rough ones
    groups: dict[str, Any] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)  # in the order in which they began
    left: list[str] = field(default_factory=list)  # processes still there after the end

    @property
    def ok(self) -> bool:
        return not self.left and not self.groups.get("lost", 1) and not self.groups.get("trained_twice", 1)


class _Pace:
    """Trained groups a second, over several periods."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.seconds, self._trained = folder, 0.0, 0

    @property
    def rate(self) -> float:
        return self._trained / max(self.seconds, 1e-9)

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin, before = time.monotonic(), _trained(self._folder)
        yield
        self.seconds += time.monotonic() - begin
        self._trained += _trained(self._folder) - before


class Drill:
    """A run that is disturbed on a schedule."""

    def __init__(
        self,
        config: RunConfig,
        command: list[str],
        *,
        seconds: float,
        calm_s: float,
        every_s: float,
        seed: int,
        spare: Collection[str] = (),
        note: Callable[[str], None],
    ) -> None:
        """Prepare a drill.

        command: trains `config`, and resumes it when it is run again. calm_s: seconds of each calm period. every_s: mean
        seconds between two faults of a rough period. spare: roles that get no faults.
        """
        self._config, self._command, self._note = config, command, note
        self._seconds, self._calm_s, self._every_s = seconds, calm_s, every_s
        self._rng, self._spare = random.Random(seed), spare
        self._looks: dict[tuple[int, float], list[Look]] = {}  # by process id and start time
        self._looked = 0.0
        self._folder = config.run_dir
        self._log = self._folder.with_name(self._folder.name + ".faults")
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._armed = ""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run the drill to its end and count the groups."""
        begin = time.monotonic()
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        asked = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `_end` runs
        with open(self._folder.with_name(self._folder.name + ".log"), "ab") as self._output:
            try:
                self._loop(begin)
                self._stop()
            finally:
                self._end()
                signal.signal(signal.SIGTERM, asked)
        self._note("the ledger is read: what became of every group")
        self.outcome.seconds = time.monotonic() - begin
        with SqliteLedger(self._folder, mode="read") as ledger:
            self.outcome.groups = ledger.counts().figures()
        self.outcome.left = [" ".join(p.cmdline()[:4]) for p in self._all()]
        return self.outcome

    def _loop(self, begin: float) -> None:
        """Alternate calm and rough periods, so that other causes of a change of speed affect both."""
        self._note(f"the run starts in {self._folder}, and its first step is awaited; its output: {self._folder}.log")
        self._start()
        steps = _steps(self._folder)
        while steps == _steps(self._folder):  # measure from the first step on: a start is not the run's speed
            self._tick()
        calm, rough = _Pace(self._folder), _Pace(self._folder)
        end = begin + self._seconds
        while time.monotonic() < end and not self._complete():
            self._phase(begin, end, self._calm_s, "undisturbed, to compare with")
            with calm.measured():
                until = min(time.monotonic() + self._calm_s, end)
                while time.monotonic() < until and not self._complete():
                    self._tick()
            self._phase(begin, end, ROUGH_S, f"with a fault every {self._every_s:g} s on average")
            with rough.measured():
                self._suffer(begin, min(time.monotonic() + ROUGH_S, end))
        self.outcome.calm_s, self.outcome.calm_rate, self.outcome.rate = calm.seconds, calm.rate, rough.rate
        self._look()
        self.outcome.lives = [Life.of(looks) for looks in self._looks.values()]

    def _phase(self, begin: float, end: float, longest: float, what: str) -> None:
        now = time.monotonic()
        self._note(f"{now - begin:6.0f} s  the next {max(0.0, min(longest, end - now)):.0f} s are {what}")

    def _suffer(self, begin: float, until: float) -> None:
        """Cause faults until `until`. The recovery from the last one belongs to the period."""
        due = time.monotonic()
        while (now := time.monotonic()) < until and not self._complete():
            if now < due or (fault := self._fault(begin)) is None:
                self._tick()
                continue
            hit, steps, back = begin + fault.at, _steps(self._folder), None
            due += self._rng.uniform(0.5, 1.5) * self._every_s
            latest = max(until, hit + STOP_S)
            while (now := time.monotonic()) < latest and not self._complete():
                if (now >= due and due < until) or (back is not None and now >= min(due, until)):
                    break  # the next fault is due, or the run has recovered
                self._tick()
                if back is None and _steps(self._folder) > steps:
                    back = time.monotonic() - hit
            self.outcome.faults.append(replace(fault, recovered_s=back))
            came = "" if back is None else f"; the next step ended {back:.1f} s later"
            self._note(f"{fault.at:6.0f} s  {fault.what} {fault.whom}{came}")

    def _start(self) -> None:
        environment = os.environ | {LOG_VARIABLE: str(self._log), VARIABLE: self._armed}
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self.outcome.starts += 1

    def _tick(self) -> None:
        """Wait a moment, and restart a controller that has ended, unless the run is complete."""
        assert self._process is not None
        time.sleep(TICK_S)
        if time.monotonic() - self._looked > LOOK_S:
            self._look()
        status = self._process.poll()
        if status is not None and not self._complete():
            self.outcome.statuses.append(status)
            if status == 2 or self.outcome.starts > 3 + 2 * len(self.outcome.faults):
                raise RuntimeError(f"the run does not start: status {status}, see {self._folder}.log")
            self._start()

    def _complete(self) -> bool:
        return (self._folder / "report.json").is_file()

    def _fault(self, begin: float) -> PlannedFault | None:
        """Do one thing to one process. Returns None while there is no process to do it to."""
        parts = self._parts()
        kinds = {name.partition("-")[0] for name in parts}
        if "trainer" not in kinds:  # the run, or its trainer alone, is being started
            return None
        able = [f for f in FAULTS if f[1] in kinds and f[1] not in self._spare]
        what, role, _ = self._rng.choices(able, [weight for _, _, weight in able])[0]
        name = self._rng.choice(sorted(n for n in parts if n.partition("-")[0] == role))
        at = time.monotonic() - begin
        if what == "disk":
            self._armed = f"trainer:save:*:disk-full:{len(self.outcome.faults)}"  # the number makes it a new fault
        with suppress(psutil.NoSuchProcess):
            self._do("kill" if what == "disk" else what, parts[name], role)
        return PlannedFault(at, what, name)

    def _do(self, what: str, process: psutil.Process, role: str) -> None:
        if what == "kill":
            process.kill()
        elif what == "starve":
            end = time.monotonic() + STARVED_S
            while time.monotonic() < end:
                process.suspend()
                time.sleep(DUTY_S * (1 - RUN_SHARE))
                process.resume()
                time.sleep(DUTY_S * RUN_SHARE)
        else:
            process.suspend()
            if role == "controller":  # nothing watches the controller
                time.sleep(FROZEN_S)
                process.resume()

    def _parts(self) -> dict[str, psutil.Process]:
        """The run's present processes, by name."""
        assert self._process is not None
        parts: dict[str, psutil.Process] = {}
        named: dict[int, str] = {}
        with suppress(ConfigError):  # status.json is not there yet
            named = {p["pid"]: p["name"] for p in read_json(self._folder / STATUS)["processes"] if p["alive"]}
        with suppress(psutil.NoSuchProcess):
            controller = psutil.Process(self._process.pid)
            parts["controller"] = controller
            for child in controller.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if name := named.get(child.pid) or unnamed(child, controller.pid):
                        parts[name] = child
        return parts

    def _look(self) -> None:
        """Measure the size of the run's processes."""
        self._looked = time.monotonic()
        for name, process in self._parts().items():
            with suppress(psutil.NoSuchProcess):
                began, size = process.create_time(), RunSize(process.memory_info().rss / 1e6, process.num_fds())
                self._looks.setdefault((process.pid, began), []).append(Look(name, time.time() - began, size))

    def _stop(self) -> None:
        """Ask the run to end after its step, as Ctrl-C does."""
        self._note(f"the run is asked to stop after its step, for at most {STOP_S:g} s")
        assert self._process is not None
        for each in self._all():
            with suppress(psutil.NoSuchProcess):
                each.resume()
        running = self._process.poll() is None
        if running and not self._complete():
            self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.outcome.statuses.append(self._process.wait(STOP_S))

    def _end(self) -> None:
        for each in self._all():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if self._process is not None:
            self._process.wait(STOP_S)

    def _all(self) -> list[psutil.Process]:
        """Every process of this drill, including orphans: all have its environment variable."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and _marked(p, str(self._log))]


def unnamed(process: psutil.Process, controller: int) -> str:
    """Name for a process that status.json does not name; "" if it is no part of the run."""
    words = process.cmdline()
    if process.name() == KEEPER.decode():
        return ""
    if role := next((WORKERS[word] for word in words if word in WORKERS), ""):
        return f"{role}-{process.pid}"
    if MODULE not in words:
        return ""
    forked = process.ppid() != controller  # with the fork server's command line
    return f"{STARTING if forked else FORKSERVER}-{process.pid}"


def _marked(process: psutil.Process, log: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(LOG_VARIABLE) == log
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _count(folder: Path, what: Callable[[SqliteLedger], int]) -> int:
    if not (folder / "ledger.sqlite").is_file() or not has_ledger(folder):
        return 0
    with SqliteLedger(folder, mode="read") as ledger:
        return what(ledger)


def _steps(folder: Path) -> int:
    """The number of steps that have ended, repeated ones included."""
    return _count(folder, SqliteLedger.ended_steps)


def _trained(folder: Path) -> int:
    return _count(folder, lambda ledger: ledger.counts().trained)
