"""Runs as a user starts them, with faults; what they leave, and whether the promises held."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from repeat_task import ALPHABET

from tidemill.core.fault_injection import LOG_VARIABLE, VARIABLE
from tidemill.models.new_model import SIZES, fresh_model

TASK = Path(__file__).with_name("repeat_task.py")
RECIPE = """
model = "{model}"
run_dir = "{run}"
env = "{task}:{env}"
steps = {steps}
max_lag = {max_lag}
deterministic = {deterministic}
placement = {{ kind = "{placement}", engines = {engines} }}
rollout = {{ groups = {groups}, group_size = {groups}, max_tokens = 3 }}
trainer.lr = {lr}
engine.max_sequences = 64
algorithm = {{ name = "grpo", zero_variance = "{zero_variance}" }}
eval = {{ every = {eval_every}, tasks = 16, final_tasks = 16 }}
record = {{ checkpoint_every = 3, checkpoints = 2, probe_every = 4, trace = false }}
scoring = {{ workers = 1, limit_s = 3 }}
supervise = {{ backoff_s = 0.1, heartbeat_s = 0.2, silent_s = 5, stuck_s = 60 }}
"""


@dataclass(frozen=True)
class Ended:
    status: int  # negative: the signal
    seconds: float
    lines: list[dict[str, Any]]  # what it printed, as --json
    errors: str

    @property
    def last_line(self) -> str:
        return self.errors.strip().splitlines()[-1] if self.errors.strip() else ""


@dataclass
class GoesOn:
    """A run that goes on until it is interrupted."""

    process: subprocess.Popen[str]
    said: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # its output and errors, once it has ended
    alive: bool = True  # until it was interrupted


class Run:
    """One recipe in one folder; `train` it as often as it takes."""

    def __init__(
        self,
        folder: Path,
        *,
        env: str = "score",
        steps: int = 8,
        groups: int = 4,
        max_lag: int = 1,
        deterministic: bool = False,
        placement: str = "local",
        engines: int = 1,
        eval_every: int = 0,
        zero_variance: str = "drop",
        lr: float = 3e-3,
        more: str = "",
        overrides: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.env, self.steps, self.groups, self.max_lag = folder / "run", env, steps, groups, max_lag
        self.log, self.overrides = folder / "faults.log", overrides
        self._temporary = TemporaryDirectory(prefix="t-")  # short: a socket's path may not be long
        if not (folder / "model").exists():
            fresh_model(folder / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
        self.recipe = folder / "recipe.toml"
        text = RECIPE.format(
            model=folder / "model",
            run=self.folder,
            task=TASK,
            env=env,
            steps=steps,
            groups=groups,
            max_lag=max_lag,
            deterministic=str(deterministic).lower(),
            placement=placement,
            engines=engines,
            eval_every=eval_every,
            zero_variance=zero_variance,
            lr=lr,
        )
        self.recipe.write_text(text + more)

    def start(self, faults: str = "", *overrides: str) -> subprocess.Popen[str]:
        mark = {VARIABLE: faults, LOG_VARIABLE: str(self.log), "OMP_NUM_THREADS": "1", "TMPDIR": self._temporary.name}
        command = [sys.executable, "-m", "tidemill", "train", str(self.recipe), "--json", *self.overrides, *overrides]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, env=os.environ | mark, text=True, start_new_session=True, **pipes)

    def train(self, faults: str = "", *overrides: str, limit_s: float = 90.0) -> Ended:
        """Until it ends. A run that does not is a failure, and is killed with everything it started."""
        begin = time.monotonic()
        process = self.start(faults, *overrides)
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            for each in self.leftovers():
                each.send_signal(signal.SIGKILL)
            out, errors = process.communicate(timeout=30)
            raise AssertionError(
                f"the run hung for {limit_s:g} s under {faults!r}\n{out[-2000:]}\n{errors[-4000:]}"
            ) from None
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return Ended(process.returncode, time.monotonic() - begin, lines, errors)

    @contextmanager
    def going_on(self) -> Iterator[GoesOn]:
        """A run that is interrupted when the context ends. It must have lived until then, and ends by itself."""
        run = GoesOn(self.start())
        reading = threading.Thread(target=lambda: run.said.append(run.process.communicate()))
        reading.start()
        try:
            yield run
            run.alive = run.process.poll() is None
            run.process.send_signal(signal.SIGINT)
            reading.join(120)
        finally:
            for each in self.leftovers() if reading.is_alive() else ():
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGKILL)
            reading.join(30)
        assert run.alive and run.process.returncode == 3, run.said  # stopped, and can go on

    def status(self) -> dict[str, Any]:
        """The latest status file, or nothing before there is one."""
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "status.json").read_text())
        return {}

    def processes(self) -> dict[str, int]:
        """The ids of the run's present processes by name, as its status file tells them."""
        return {each["name"]: each["pid"] for each in self.status().get("processes", ()) if each["alive"]}

    def goes_on(self, run: GoesOn, steps: int = 2, limit_s: float = 120.0) -> None:
        """Wait until the run has trained so many steps more."""
        begin = self._step()
        self.comes_to(run, lambda: self._step() >= begin + steps, limit_s)

    def comes_to(self, run: GoesOn, there: Callable[[], bool], limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while not there():
            assert run.process.poll() is None, run.said
            assert time.monotonic() < end, f"not within {limit_s:g} s: {self.status()}"
            time.sleep(0.1)

    def _step(self) -> int:
        return self.status().get("step") or 0

    def gaps(self) -> list[float]:
        """The mean |engine's logprob - trainer's| under the same weights, of each step that had any."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line["mismatch/lag0_mean"] for line in lines if line.get("mismatch/lag0_mean") is not None]

    def ends_at_random(
        self,
        run: GoesOn,
        number: int,
        rng: random.Random,
        chosen: Callable[[dict[str, int]], list[int]],
        limit_s: float = 900,
    ) -> int:
        """Kill or stop `number` of the processes that `chosen` picks from all, at any moment. Returns how many it were."""
        sent, following, end = 0, 0.0, time.monotonic() + 900
        while run.process.poll() is None and sent < number and time.monotonic() < end:
            pids = chosen(self.processes())
            if pids and time.monotonic() > following:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), rng.choice((signal.SIGKILL, signal.SIGSTOP)))
                    sent += 1
                following = time.monotonic() + rng.uniform(1.0, 6.0)
            time.sleep(0.1)
        return sent

    def happened(self) -> list[str]:
        """The faults that happened so far."""
        return self.log.read_text().split() if self.log.exists() else []

    def leftovers(self, within_s: float = 0.0) -> list[psutil.Process]:
        """Processes of this run that are still there after so many seconds."""
        end = time.monotonic() + within_s
        while True:
            found = [p for p in psutil.process_iter() if self._ours(p)]
            if not found or time.monotonic() >= end:
                return found
            time.sleep(0.05)

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(LOG_VARIABLE) == str(self.log)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def check(self, complete: bool = True) -> None:
        """Nothing lost, nothing trained twice, the lag bound kept; nothing left running."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            db.row_factory = sqlite3.Row
            counts = dict(db.execute("SELECT * FROM conservation").fetchone())
            assert counts["lost"] == counts["trained_twice"] == 0, counts
            lag = db.execute(
                "SELECT max(groups.step - oldest) FROM groups JOIN trajectories ON group_id = id WHERE fate = 'trained'"
            ).fetchone()[0]
            assert lag is None or 0 <= lag <= self.max_lag, lag
            if complete:
                assert counts["trained"] == self.groups * self.steps and counts["pending"] == 0, counts
                steps = [r[0] for r in db.execute("SELECT step FROM live_steps ORDER BY step")]
                assert steps == list(range(self.steps))
        assert not (left := self.leftovers(15)), [p.cmdline() for p in left]
        assert not (left := list(Path(self._temporary.name).glob("tidemill*"))), left
        assert not list(self.folder.glob("**/*.partial")) or not complete

    def streamed(self) -> int:
        """Groups that were gone through before their step was complete."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            said = [json.loads(row[0]) for row in db.execute("SELECT metrics FROM steps WHERE metrics IS NOT NULL")]
        return int(sum(metrics.get("streamed", 0) for metrics in said))

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())

    def weights(self) -> bytes:
        return (self.folder / "final" / "model.safetensors").read_bytes()
