"""A run whose engines come and go: one joins and one is drained while training goes on, in processes of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tidemill
from tidemill.cli.commands import pool
from tidemill.core.errors import ConfigError
from tidemill.core.types import InfraError, Trajectory
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.records import Event
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.cluster import Cluster

Change = Callable[[Cluster], Any]


def changing(monkeypatch: pytest.MonkeyPatch, change: Change) -> list[BaseException | None]:
    """Have `change` done to a run's parts while it trains. Returns its outcome, once it has ended: an error or None."""
    watched, ended = Cluster.watched, list[BaseException | None]()

    @asynccontextmanager
    async def changed(self: Cluster) -> AsyncIterator[None]:
        async with watched(self):
            changes = asyncio.ensure_future(change(self))
            changes.add_done_callback(lambda task: ended.append(None if task.cancelled() else task.exception()))
            yield
            await changes

    monkeypatch.setattr(Cluster, "watched", changed)
    return ended


async def trained(parts: Cluster, step: int) -> None:
    """Wait until the version of this step is published."""
    async with asyncio.timeout(60):
        while not parts.pool.in_force or parts.pool.in_force[0].step < step:
            await asyncio.sleep(0.005)


def train(folder: Path, **more: Any) -> tidemill.Run:
    fresh_model(folder / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    how: dict[str, Any] = {
        "rollout": {"groups": 4, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 0, "tasks": 1, "final_tasks": 1},
        "record": {"checkpoint_every": 0, "trace": False, "probe_every": 1},
        "scoring": {"accept": ["gold", "garbage"]},
        "placement": "inline",
    }
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 2}
    return tidemill.train(env, folder / "model", run_dir=folder / "run", quiet=True, **how | more)


def conserved(folder: Path) -> tuple[list[Event], list[Trajectory]]:
    """What happened to engines, and the attempts of all groups. Nothing was lost, and nothing trained twice."""
    with SqliteLedger(folder, mode="read") as ledger:
        assert ledger.counts().conserved
        events = [event for event in ledger.events() if event.kind.startswith("engine_")]
        groups = [ledger.load(number) for number in range(ledger.next_group_id()) if ledger.has_payload(number)]
        return events, [attempt for group in groups for attempt in group.trajectories]


@pytest.mark.slow
def test_one_engine_joins_and_another_is_drained_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, pids = list[int](), dict[str, int]()

    async def change(parts: Cluster) -> None:
        def note(*names: str) -> None:
            (version,) = parts.pool.in_force
            steps.append(version.step)
            now = {handle.vitals().name: handle.vitals() for handle in parts.handles()}
            pids.update({name: each.pid for name, each in now.items()})
            assert set(now) == {"trainer", *names} and [m.name for m in parts.pool.members] == list(names)

        await trained(parts, 2)
        note("engine-0", "engine-1")
        assert await asyncio.to_thread(pool.add, tmp_path / "run", False) == 0
        note("engine-0", "engine-1", "engine-2")
        assert await asyncio.to_thread(pool.remove, tmp_path / "run", "engine-0", False, False) == 0
        note("engine-1", "engine-2")
        assert not psutil.pid_exists(pids["engine-0"])
        await trained(parts, steps[-1] + 2)
        await parts.drain("engine-1", hand_over=True)
        await trained(parts, steps[-1] + 4)
        note("engine-2")

    ended = changing(monkeypatch, change)
    placement = {"engines": 2, "engine_threads": 1, "trainer_threads": 1, "environment": {"workers": 0}}
    run = train(tmp_path, steps=40, max_lag=2, placement=placement)
    assert run.complete and ended == [None] and 0 < steps[0] < steps[-1] < 40
    events, attempts = conserved(run.folder)
    kinds = [(event.kind, event.detail["engine"]) for event in events]
    assert kinds == [("engine_joined", "engine-2"), ("engine_drained", "engine-0"), ("engine_drained", "engine-1")]
    assert attempts and not any(isinstance(attempt.outcome, InfraError) for attempt in attempts)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("lag/max", 0) for line in lines) <= 2
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_engine_that_restarts_with_less_context_limits_the_run_or_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    async def change(parts: Cluster) -> None:
        await trained(parts, 1)
        engine = type(parts.pool.engines[0])
        full = engine.capabilities

        async def less(self: Any) -> Any:
            return replace(await full(self), context=16, score=False)

        async def refuses(self: Any, *asked: Any) -> Any:
            assert self is old, "it was asked for what it cannot do"
            return await score(self, *asked)

        old, score = parts.pool.engines[0], engine.score
        monkeypatch.setattr(engine, "capabilities", less)
        monkeypatch.setattr(engine, "score", refuses)
        parts.handles()[1].kill("is to be started again")
        await trained(parts, 3)
        assert [can.context for can in parts.capabilities] == [16] == [parts.pool.context]

    ended = changing(monkeypatch, change)
    how: dict[str, Any] = {"steps": 6, "max_lag": 1, "deterministic": deterministic}
    if deterministic:
        with pytest.raises(ConfigError, match="engine-0 joins with a context of 16 tokens, where the run had 64 so far"):
            train(tmp_path, **how)
        return
    run = train(tmp_path, **how)
    assert run.complete and ended == [None]
    events, attempts = conserved(run.folder)
    told = [event.detail["how"] for event in events if event.kind == "engine_adapted"]
    lengths = [len(attempt.tokens) for attempt in attempts]
    assert any("engine-0 joins with a context of 16" in each for each in told) and any("no probe" in each for each in told)
    assert max(lengths) > 16 and np.max(lengths[-6:]) <= 16
