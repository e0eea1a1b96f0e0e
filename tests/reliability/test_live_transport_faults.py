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
