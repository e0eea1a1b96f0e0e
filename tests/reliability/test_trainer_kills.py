"""SIGKILL and SIGSTOP of trainer processes alone: engines keep theirs, and nothing is lost or trained twice."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import Run
from test_kills import undisturbed

from tidemill.ledger.ledger import SqliteLedger

pytestmark = pytest.mark.runs

KILLS = int(os.environ.get("TIDEMILL_TEST_TRAINER_KILLS", "6"))  # of each run
RESUME = ("supervise.resume=true", "supervise.restarts=1000", "supervise.backoff_s=0")
RANKS = ("trainer.ranks=2", "trainer.shard=zero2")
LIMIT_S = 300.0


class Watched:
    """A run, and the processes that its status file names while it goes on."""

    def __init__(self, run: Run, faults: str, *overrides: str) -> None:
        self.run, self.process = run, run.start(faults, *RESUME, *overrides)
        self.pids: dict[str, list[int]] = {}  # by name, in order
        self.said = ("", "")
        self._reading = threading.Thread(target=self._read)  # a full pipe would hold the run up
        self._reading.start()

    def _read(self) -> None:
        self.said = self.process.communicate()

    def look(self) -> dict[str, int]:
        """The present processes by name; kept if they are new."""
        with suppress(FileNotFoundError):
            named = json.loads((self.run.folder / "status.json").read_text())["processes"]
            for each in named:
                known = self.pids.setdefault(each["name"], [])
                if each["alive"] and each["pid"] not in known[-1:]:
                    known.append(each["pid"])
            return {each["name"]: each["pid"] for each in named if each["alive"]}
        return {}

    def ended(self, each: float = 0.05) -> bool:
        time.sleep(each)
        return self.process.poll() is not None

    def to_the_end(self) -> None:
        end = time.monotonic() + LIMIT_S
        try:
            while not self.ended():
                assert time.monotonic() < end, "the run hung"
                self.look()
            self._reading.join(30)
            assert self.process.returncode == 0, self.said[1]
        finally:
            for each in self.run.leftovers():
                each.kill()
            self._reading.join(30)
        self.run.check()
        engines = {name: pids for name, pids in self.pids.items() if name.startswith("engine")}
        assert engines and all(len(pids) == 1 for pids in engines.values()), engines

    def restarts(self) -> int:
        with SqliteLedger(self.run.folder, mode="read") as ledger:
            assert not ledger.events("engine_lost")
            assert {event.detail["restarted"] for event in ledger.events("run_resumed")} <= {"the trainer"}
            return len(ledger.events("run_resumed"))


PHASES = (
    "train:2:kill",
    "apply:2:stop",
    "stream:3:kill",
    "publish:4:stop",
    "snapshot:3:kill",
    "save:6:kill",
    "train:7:kill",
)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic, ranks", [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_in_each_phase_of_a_run_only_the_trainer_is_started_again(deterministic: bool, ranks: int, tmp_path: Path) -> None:
    run = Run(tmp_path, steps=12, engines=2, max_lag=2, eval_every=8, deterministic=deterministic, zero_variance="drop")
    role = "trainer" if ranks == 1 else "trainer-1"
    faults = " ".join(f"{role}:{phase}" for phase in PHASES)
    watched = Watched(run, faults, *(RANKS if ranks == 2 else ()))
    watched.to_the_end()
    assert sorted(run.happened()) == sorted(faults.split())
    assert watched.restarts() == len(PHASES) and len(watched.pids["trainer"]) > 1
    if deterministic and ranks == 1:
        assert run.weights() == undisturbed(2, 12)[0], "other weights than undisturbed"
    elif deterministic:
        whole = Run(tmp_path / "whole", steps=12, max_lag=2, deterministic=True)
        assert whole.train("", *RANKS).status == 0 and run.weights() == whole.weights()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_and_frozen_at_any_moment(seed: int, tmp_path: Path) -> None:
    """One rank at a time, in runs of one and of two ranks."""
    rng, overrides = random.Random(seed), RANKS if seed % 2 else ()
    run = Run(tmp_path, steps=10 * KILLS, engines=2, max_lag=1 + seed % 2, zero_variance="keep", eval_every=20)
    watched, sent = Watched(run, "", *overrides), 0
    while sent < KILLS and not watched.ended(rng.uniform(0.1, 1.5)):
        trainers = [pid for name, pid in watched.look().items() if name.startswith("trainer")]
        if trainers:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(trainers), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
                sent += 1
    watched.to_the_end()
    assert 0 < watched.restarts() <= sent


@pytest.mark.slow
def test_the_controller_dies_after_the_trainer_was_started_again(tmp_path: Path) -> None:
    """What a lone restart leaves in the record and in checkpoints, the next process goes on from, to the same bits."""
    run = Run(tmp_path, steps=12, engines=1, max_lag=2, deterministic=True)
    faults = "trainer:apply:4:kill controller:train:5:kill"
    assert run.train(faults, *RESUME).status == -signal.SIGKILL
    run.check(complete=False)
    assert run.train("trainer:train:4:kill", *RESUME).status == 0
    run.check()
    assert run.weights() == undisturbed(2, 12)[0]


def test_a_killed_trainer_is_started_again_and_its_engine_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=4, zero_variance="keep")
    watched = Watched(run, "trainer:apply:2:kill")
    watched.to_the_end()
    assert watched.restarts() == 1 and len(watched.pids["trainer"]) == 2


@pytest.mark.slow
def test_an_adapter_goes_on_to_the_same_bits_after_kills(tmp_path: Path) -> None:
    """Trainer, engine and controller are killed; an engine that starts again loads the base and is sent the adapter."""
    lora = ("trainer.lora.rank=4", "trainer.lora.targets=['q_proj','down_proj']")
    run = Run(tmp_path, steps=8, engines=1, max_lag=1, deterministic=True, overrides=lora)
    faults = "trainer:apply:2:kill engine-0:commit:4:kill controller:train:5:kill"
    assert run.train(faults, *RESUME).status == -signal.SIGKILL
    run.check(complete=False)
    assert run.train("trainer:stream:7:kill", *RESUME).status == 0
    run.check()
    assert set(run.happened()) == {*faults.split(), "trainer:stream:7:kill"}
    assert run.weights() == undisturbed(1, 8, *lora)[0]
    report = run.report()
    assert report["published_mb"]["sent"] < report["published_mb"]["whole"] / 3
