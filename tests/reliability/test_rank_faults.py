"""Single ranks of a trainer are killed and stopped; the run goes on with a new group of ranks, and the engine's process."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Run

RANKS = ("trainer.ranks=2", "supervise.resume=true", "supervise.restarts=1000", "supervise.backoff_s=0.05")
PLACES = ("train", "reduce", "apply", "publish", "stream", "save", "save-optimizer")


def placed(seed: int) -> list[str]:
    """Twenty faults, each of one rank in one phase of a step of its own; checkpoints are saved every third step.

    "reduce" is counted in each process anew: its backward passes, which the other ranks wait for to add up gradients.
    """
    rng, faults = random.Random(seed), []
    for number in range(20):
        phase, step = PLACES[number % len(PLACES)], number + 2
        step = 1 + number // len(PLACES) if phase == "reduce" else step
        step += -step % 3 if phase.startswith("save") else 0
        faults.append(f"{rng.choice(('trainer', 'trainer-1'))}:{phase}:{step}:{rng.choice(('kill', 'stop'))}")
    return list(dict.fromkeys(faults))


def processes(run: Run) -> dict[str, int]:
    """The ids of the run's present processes by name, as its status file tells them."""
    with suppress(OSError, ValueError):
        status: dict[str, Any] = json.loads((run.folder / "status.json").read_text())
        return {each["name"]: each["pid"] for each in status["processes"] if each["alive"]}
    return {}


def events(run: Run) -> list[str]:
    """What was restarted, by the events of the ledger."""
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        details = db.execute("SELECT detail FROM events WHERE kind = 'run_resumed'").fetchall()
    return [json.loads(detail).get("restarted") for (detail,) in details]


def expected_tokens(run: Run) -> int:
    """Sampled tokens of all attempts in the ledger, and of the evaluation before the first step."""
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        recorded = db.execute("SELECT sum(sampled) FROM trajectories").fetchone()[0]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "eval/n" in line)
    return recorded + round(first["eval/n"] * first["eval/length"])


@pytest.mark.ranks
@pytest.mark.parametrize("shard, seed", [("zero2", 1), ("zero3", 2)])
def test_ranks_that_end_in_any_phase(shard: str, seed: int, tmp_path: Path) -> None:
    run = Run(tmp_path, steps=30, overrides=(*RANKS, f"trainer.shard={shard}"))
    faults = placed(seed)
    ended = run.train(" ".join(faults), limit_s=600)
    assert ended.status == 0, ended.errors
    assert set(run.happened()) == set(faults)  # "trainer" is any rank, and both may come there at once
    alone = len([each for each in faults if ":reduce:" not in each])  # those may happen together with another one
    assert set(events(run)) == {"the trainer"} and alone <= len(events(run)) <= len(faults)
    run.check()
    assert run.report()["engine_tokens"]["generated"] == expected_tokens(run), "the engine sampled a token twice"


@pytest.mark.ranks
def test_ranks_that_end_at_any_moment(tmp_path: Path) -> None:
    """Twenty of them, whatever they do: also while steps are trained again, and while they start."""
    run, rng = (
        Run(tmp_path, steps=100_000, zero_variance="keep", lr=1e-6, overrides=(*RANKS, "record.checkpoint_every=5")),
        random.Random(3),
    )
    process, sent, engines, last = run.start(), 0, set[int](), 0.0
    said, begin = list[tuple[str, str]](), time.monotonic()
    reading = threading.Thread(target=lambda: said.append(process.communicate()))
    reading.start()
    try:
        while process.poll() is None and sent < 20 and time.monotonic() - begin < 900:
            now = processes(run)
            engines |= {pid for name, pid in now.items() if name.startswith("engine")}
            ranks = [pid for name, pid in now.items() if name.startswith("trainer")]
            if len(ranks) == 2 and time.monotonic() > last:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(ranks), rng.choice((signal.SIGKILL, signal.SIGSTOP)))
                    sent += 1
                last = time.monotonic() + rng.uniform(1.0, 6.0)
            time.sleep(0.1)
        alive = process.poll() is None
        process.send_signal(signal.SIGINT)
        reading.join(120)
    finally:
        for each in run.leftovers() if reading.is_alive() else ():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        reading.join(30)
    assert sent == 20 and alive and process.returncode == 3, said  # stopped, and can go on
    assert len(engines) == 1, "the engine's process is the one that the run began with"
    assert len(events(run)) >= 15 and set(events(run)) == {"the trainer"}
    run.check(complete=False)


@pytest.mark.ranks
def test_two_ranks_repeat_a_deterministic_run_to_the_bit(tmp_path: Path) -> None:
    """Also when they are killed; and the first step's gradient has the norm of one rank's."""

    def trained(name: str, ranks: int, faults: str = "", *overrides: str) -> tuple[bytes, float]:
        given = (f"trainer.ranks={ranks}", "supervise.resume=true", *overrides)
        run = Run(tmp_path / name, steps=7, deterministic=True, overrides=given)
        ended = run.train(faults, limit_s=180)
        assert ended.status == 0, ended.errors
        assert set(run.happened()) == set(faults.split())
        run.check()
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        return run.weights(), next(line["train/grad_norm"] for line in lines if "train/grad_norm" in line)

    (alone, norm), (two, same) = trained("one", 1), trained("two", 2)
    assert same == pytest.approx(norm, rel=1e-5) and alone != two
    assert trained("killed", 2, "trainer-1:apply:3:kill trainer:train:5:kill")[0] == two
    assert trained("zero3", 2, "", "trainer.shard=zero3")[1] == pytest.approx(norm, rel=1e-5)
