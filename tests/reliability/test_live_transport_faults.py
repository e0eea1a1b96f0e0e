"""Ranks and engines are killed and stopped while weights travel between them; nothing that is served is a mixture."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from runs import Run

HOW = (
    "placement.engines=2",
    "trainer.ranks=2",
    "supervise.resume=true",
    "supervise.restarts=1000",
    "supervise.backoff_s=0.05",
)
TRAINERS, ENGINES = ("trainer", "trainer-1"), ("engine-0", "engine-1")
PLACES = [*((each, "publish") for each in TRAINERS), *((each, "send") for each in TRAINERS)]
PLACES += [*((each, "stage") for each in ENGINES), *((each, "commit") for each in ENGINES)]


def placed(seed: int) -> list[str]:
    """Twenty faults, each while the version of a step of its own is published."""
    rng, faults = random.Random(seed), list[str]()
    for number in range(20):
        role, phase = PLACES[number % len(PLACES)]
        faults.append(f"{role}:{phase}:{number + 2}:{rng.choice(('kill', 'stop'))}")
    return faults


@pytest.mark.ranks
@pytest.mark.parametrize("transport, seed", [("collective", 1), ("direct", 2)])
def test_either_side_ends_while_weights_travel(transport: str, seed: int, tmp_path: Path) -> None:
    """No hang, nothing lost, nothing trained twice, each later version served; engines and trainer agree on each token."""
    run = Run(tmp_path, steps=24, overrides=(*HOW, f"placement.sync.transport={transport}", "record.probe_every=1"))
    faults = placed(seed)
    ended = run.train(" ".join(faults), limit_s=600)
    assert ended.status == 0, ended.errors
    assert set(run.happened()) == set(faults)
    run.check()
    report = run.report()
    assert report["mismatch_lag0"]["tokens"] > 0 and report["mismatch_lag0"]["max"] < 1e-4, report["mismatch_lag0"]


@pytest.mark.ranks
@pytest.mark.parametrize("transport, seed", [("collective", 3), ("direct", 4)])
def test_either_side_ends_at_any_moment(transport: str, seed: int, tmp_path: Path) -> None:
    """Twenty of them, while a version is published every fraction of a second; versions are published after the last."""
    more = (*HOW, f"placement.sync.transport={transport}", "record.probe_every=1", "record.checkpoint_every=5")
    run = Run(tmp_path, steps=100_000, zero_variance="keep", lr=1e-6, overrides=more)

    def whole(now: dict[str, int]) -> list[int]:
        return list(now.values()) if set(now) == {*TRAINERS, *ENGINES} else []

    with run.going_on() as process:
        assert run.ends_at_random(process, 20, random.Random(seed), whole) == 20, process.said
        run.goes_on(process, steps=3)
    run.check(complete=False)
    assert (gaps := run.gaps()) and max(gaps) < 1e-5, gaps
