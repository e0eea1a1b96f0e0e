"""kill -9, ten times in a run, at places chosen by a seed: every resume succeeds, nothing is lost, nothing is trained twice.

The whole process tree is killed: the controller first, by the process that meets the fault. In deterministic mode the final
weights must be those of a run that nothing disturbed, to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from runs import Run

from tidemill.ledger.database import has_ledger

pytestmark = pytest.mark.runs

STEPS, EVERY = 24, 3  # EVERY: steps between checkpoints, as in the recipe
LONG, LEARNT = 140, 0.5  # steps, and an accuracy: 0 at first, and 0.8 to 1 after so many steps that nothing disturbs
KILLS = int(os.environ.get("TIDEMILL_TEST_KILLS", "10"))  # of each run


def places(run: Run, rng: random.Random, begun: int, next_id: int) -> list[str]:
    """Faults that a run which has begun so many steps will meet soon, each at another phase."""
    step = begun + rng.randrange(2)
    saved = (begun // EVERY + 1) * EVERY
    group = next_id + rng.randrange(4)
    return [
        f"controller:admit:{group}:kill-all",
        f"controller:finish:{group}:kill-all",
        f"controller:record:{group}:kill-all",
        f"controller:train:{step}:kill-all",
        f"controller:apply:{step}:kill-all",
        f"controller:publish:{begun}:kill-all",
        f"trainer:train:{step}:kill-all",
        f"trainer:apply:{step}:kill-all",
        f"trainer:publish:{begun + 1}:kill-all",
        f"trainer:stream:{begun + 1}:kill-all",
        f"engine-0:generate:{begun}:kill-all",
        f"engine-0:stage:{begun + 1}:kill-all",
        f"engine-0:commit:{begun + 1}:kill-all",
        f"{'reward:call' if run.env == 'score' else 'environment:episode'}:{rng.randrange(8)}:kill-all",
        f"trainer:snapshot:{saved}:kill-all",
        f"trainer:save:{saved}:kill-all",
        f"trainer:save:{saved}:torn-write",
        f"trainer:save:{saved}:disk-full",
        f"controller:checkpoint:{saved}:kill-all",
        f"controller:manifest:{saved}:torn-write",
        f"controller:rename:{saved}:kill-all",
        f"controller:retain:{saved}:kill-all",
    ]


def standing(run: Run) -> tuple[int, int]:
    """Steps begun, and the next admission id."""
    if not has_ledger(run.folder):  # the file is there before its tables are
        return 0, 0
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        return db.execute(
            "SELECT (SELECT coalesce(max(step) + 1, 0) FROM steps), (SELECT coalesce(max(id) + 1, 0) FROM groups)"
        ).fetchone()


def torment(run: Run, seed: int, kills: int, ahead: int = 0) -> list[str]:
    """Start the run and kill it, so many times; then let it end. Returns what happened, phase by phase.

    ahead: steps that it may do before each kill.
    """
    rng, happened = random.Random(seed), []
    for number in range(kills):
        if number % 5 == 4:
            happened.append(_killed_by_the_clock(run, rng))
        else:
            begun, next_id = standing(run)
            soon = begun + ahead, next_id + ahead * run.groups
            fault = rng.choice(places(run, rng, *soon))
            while fault in run.happened():
                fault = rng.choice(places(run, rng, *soon))
            ended = run.train(fault)
            assert fault in run.happened(), f"{fault} was never met: {ended.last_line}"
            if fault.endswith("disk-full"):
                assert ended.status == 1 and "No space left" in ended.last_line, ended.errors
            else:
                assert ended.status == -signal.SIGKILL, ended.errors
            happened.append(fault)
        run.check(complete=False)
    ended = run.train()
    assert ended.status == 0, ended.errors
    run.check()
    return happened


def _killed_by_the_clock(run: Run, rng: random.Random) -> str:
    """SIGKILL to the controller at any moment after it took the run up."""
    process = run.start()
    status, end = run.folder / "status.json", time.monotonic() + 60
    started = time.time()
    while time.monotonic() < end:
        with suppress(FileNotFoundError):  # a run that begins removes what an earlier one said
            if json.loads(status.read_text())["started"] > started:
                break
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.5))
    assert process.poll() is None, process.communicate()
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    process.communicate()
    return "clock"


@cache
def undisturbed(max_lag: int, steps: int, *overrides: str) -> tuple[bytes, float]:
    """Final weights and accuracy of a deterministic run that nothing disturbs: in one process, with one engine."""
    with TemporaryDirectory() as place:
        run = Run(Path(place), steps=steps, max_lag=max_lag, placement="inline", deterministic=True, overrides=overrides)
        ended = run.train()
        assert ended.status == 0, ended.errors
        run.check()
        return run.weights(), run.report()["accuracy_after"]


def deterministic(
    tmp_path: Path, engines: int, max_lag: int, placement: str, seed: int, kills: int, steps: int = STEPS
) -> None:
    run = Run(tmp_path, steps=steps, max_lag=max_lag, engines=engines, placement=placement, deterministic=True, eval_every=8)
    happened = torment(run, seed, kills)
    weights, accuracy = undisturbed(max_lag, steps)
    assert run.weights() == weights, f"other weights than undisturbed after {happened}"
    assert run.report()["accuracy_after"] == accuracy


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 2])
def test_killed_and_resumed_a_deterministic_run_ends_in_the_same_bits(tmp_path, max_lag):
    deterministic(tmp_path, 2, max_lag, "inline", seed=max_lag, kills=2, steps=9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_deterministic_runs_killed_ten_times(tmp_path, engines, max_lag, seed):
    deterministic(tmp_path, engines, max_lag, "local" if seed == 1 else "inline", 100 * engines + 10 * max_lag + seed, KILLS)


STREAMING = ("placement.stream=true", "trainer.micro_batch_tokens=8")


def test_killed_in_a_part_of_a_step_it_goes_on_and_nothing_is_lost(tmp_path):
    """The gradient of groups that finished early goes with the trainer: they were pending, and are trained later, once."""
    run, step = Run(tmp_path, steps=6, max_lag=0, zero_variance="keep", overrides=STREAMING), 4
    fault = f"trainer:train:{step}:kill-all"
    ended = run.train(fault)
    assert ended.status == -signal.SIGKILL and fault in run.happened(), ended.errors
    assert standing(run)[0] == step, "it was in a part: the step was not begun in the ledger"
    run.check(complete=False)
    ended = run.train()
    assert ended.status == 0, ended.errors
    run.check()
    assert run.streamed() > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_runs_killed_ten_times_learn_all_the_same(tmp_path, seed):
    """Not deterministic: the steps after a checkpoint are trained again from the record, in a new incarnation.

    Long enough to learn some of the task.
    """
    env, placement = ("repeat", "score")[seed % 2], ("local", "inline")[seed // 2 % 2]
    max_lag, engines = (0, 1, 4)[seed % 3], 1 + seed % 2
    settings = {"steps": LONG, "groups": 8, "lr": 5e-4, "zero_variance": "keep"}
    streams = STREAMING if seed % 4 < 2 else ()
    run = Run(tmp_path, env=env, max_lag=max_lag, engines=engines, placement=placement, overrides=streams, **settings)
    assert len(torment(run, seed, KILLS, ahead=(LONG - 20) // KILLS)) == KILLS
    assert run.report()["accuracy_after"] >= LEARNT > run.report()["accuracy_before"]
