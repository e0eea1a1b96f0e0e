"""Trainer, engines and controller are killed in runs of two policies: nothing lost, nothing twice, each version known."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from contradicting_tasks import check_record
from runs import TASK, Run
from test_kills import standing, torment

pytestmark = [pytest.mark.runs, pytest.mark.slow]

STEPS = 9
PLAYED = {"words": "speller", "sums": "adder"}
HOW = (
    f'env=[{{kind="python",path="{TASK}:repeat",name="words",policy="speller"}},'
    f'{{kind="python",path="{TASK}:score",name="sums",policy="adder"}}]',
    "policies={speller={},adder={lr=1e-3}}",
    "trainer.lora.rank=4",
)
RESUME = ("supervise.resume=true", "supervise.restarts=1000", "supervise.backoff_s=0")


def run_of(folder: Path, *overrides: str, engines: int = 2, max_lag: int = 1) -> Run:
    return Run(
        folder,
        steps=STEPS,
        engines=engines,
        max_lag=max_lag,
        zero_variance="keep",
        overrides=(*HOW, *overrides),
        eval_every=4,
    )


CONTROLLER = (
    "controller:admit:9:kill-all",
    "controller:record:13:kill-all",
    "controller:train:4:kill-all",
    "controller:apply:4:kill-all",
    "controller:publish:5:kill-all",
    "trainer:publish:5:kill-all",
    "trainer:apply:4:kill-all",
    "engine-0:stage:5:kill-all",
    "engine-0:commit:5:kill-all",
    "trainer:snapshot:6:kill-all",
    "trainer:save:6:torn-write",
    "controller:manifest:6:torn-write",
    "controller:rename:6:kill-all",
)


@pytest.mark.parametrize("fault", CONTROLLER)
def test_the_whole_run_is_killed_and_goes_on(fault: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    ended = run.train(fault)
    assert ended.status == -signal.SIGKILL and fault in run.happened(), ended.errors
    assert 0 < standing(run)[0] <= STEPS
    run.check(complete=False)
    ended = run.train()
    assert ended.status == 0, ended.errors
    run.check()
    check_record(run.folder, STEPS, PLAYED, killed=True)


TRAINER = "trainer:train:2:kill trainer:apply:3:stop trainer:publish:4:kill trainer:snapshot:6:kill trainer:publish:8:stop"
ENGINES = (
    "engine-0:stage:2:kill engine-1:commit:3:stop engine-0:generate:4:kill engine-1:stage:6:kill engine-0:commit:7:kill"
)


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "collective", "direct"])
@pytest.mark.parametrize("faults", [TRAINER, ENGINES, f"{TRAINER} {ENGINES}"], ids=["trainer", "engines", "both"])
def test_its_parts_are_killed_while_it_goes_on(faults: str, transport: str, tmp_path: Path) -> None:
    """Also the only engine, in the publication of either policy."""
    run = run_of(tmp_path, *RESUME, f"placement.sync.transport={transport}", "record.probe_every=1")
    ended = run.train(faults, limit_s=300)
    assert ended.status == 0, ended.errors
    assert sorted(run.happened()) == sorted(faults.split())
    run.check()
    check_record(run.folder, STEPS, PLAYED, killed=True)
    assert (gaps := run.gaps()) and max(gaps) < 1e-5, gaps


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("phase", ["stage:4", "commit:4"])
def test_the_only_engine_is_killed_while_it_gets_a_policy(phase: str, transport: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, *RESUME, f"placement.sync.transport={transport}", engines=1)
    ended = run.train(f"engine-0:{phase}:kill", limit_s=300)
    assert ended.status == 0 and run.happened(), ended.errors
    run.check()
    check_record(run.folder, STEPS, PLAYED, killed=True)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_places(seed: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, engines=1 + seed % 2, max_lag=seed)
    assert len(torment(run, seed, kills=5)) == 5
    check_record(run.folder, STEPS, PLAYED, killed=True)
