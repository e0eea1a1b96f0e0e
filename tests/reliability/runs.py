"""Runs as a user starts them, with faults; what they leave, and whether the promises held."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
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
