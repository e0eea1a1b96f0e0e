"""Single ranks of a trainer are killed and stopped; the run goes on with a new group of ranks, and the engine's process."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

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
    more = (*RANKS, "record.checkpoint_every=5")
    run, engines = Run(tmp_path, steps=100_000, zero_variance="keep", lr=1e-6, overrides=more), set[int]()

    def ranks(now: dict[str, int]) -> list[int]:
        engines.update(pid for name, pid in now.items() if name.startswith("engine"))
        found = [pid for name, pid in now.items() if name.startswith("trainer")]
        return found if len(found) == 2 else []

    with run.going_on() as process:
        assert run.ends_at_random(process, 20, random.Random(3), ranks) == 20, process.said
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
