"""Retirement, orders and several environments in whole runs: what a kill and a resume leave of them."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller.test_controller import PublisherOf, Silent, World
from virtual_time import run_virtually

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Schedule
from tidemill.core.errors import RunFailed
from tidemill.core.types import Finish, Group, Score, Task, Trajectory
from tidemill.envs.curriculum import Curriculum
from tidemill.ledger.database import has_ledger
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.task_source import giving, remembered

TASKS = [Task(f"t{i}", "?", env="ab"[i % 2]) for i in range(24)]
TASKS.sort(key=lambda task: task.env)
BATCH, LAG = 4, 2


class Killed(Exception):
    pass


class Roller:
    """Four attempts, each solved with a chance that is the task's own. Dies after so many groups."""

    def __init__(self, world: World, kill_after: int, skill: float) -> None:
        self.world, self.left, self.skill = world, kill_after, skill

    async def rollout(self, group_id: int, task: Task) -> Group:
        draw = random.Random(group_id)
        await asyncio.sleep(draw.uniform(1, 60))
        self.left -= 1
        if self.left == 0:
            raise Killed
        chance, version = self.skill * (int(task.id[1:]) + 1) / len(TASKS), self.world.serving
        mask = np.array([False, True])
        return Group(
            group_id,
            task,
            [
                Trajectory(
                    *(np.zeros(2, np.int32), mask, np.zeros(2, np.float32)),
                    *(np.where(mask, version.step, -1).astype(np.int32), Finish.STOP),
                    *(Score(float(draw.random() < chance)), (version,), sample),
                )
                for sample in range(4)
            ],
        )


class Keeping(World):
    def drop_reason(self, group: Group) -> str | None:
        return None


def live(folder: Path, order: Any, retire: float, steps: int, kill_after: int, skill: float = 1.5) -> list[tuple[int, str]]:
    """One life of a run, from what its ledger holds to its end, or to a kill. What was admitted, in order; nothing that has
    been passed as a whole by then is."""
    ledger = SqliteLedger(folder, mode="open" if has_ledger(folder) else "create", durability="process")
    weights = {"a": 2, "b": 1}
    curriculum, begun = remembered(Curriculum(TASKS, 3, order, retire, weights), ledger), ledger.next_step()
    choose, admitted = giving(curriculum), list[tuple[int, str]]()
    life = max((step.incarnation for step in ledger.steps()), default=-1) + 1

    def task_at(group_id: int) -> Task:
        done = {name for _, _, name, rewards in ledger.history() if rewards and np.mean(rewards) >= retire}
        task = choose(group_id)
        assert not retire or task.id not in done, f"group {group_id} is of {task.id} once more"
        admitted.append((group_id, task.id))
        return task

    world = Keeping(weights=begun)
    left = [ledger.load(p.id) if p.finished else (p.id, p.task) for p in ledger.pending()]
    ids = [each.id if isinstance(each, Group) else each[0] for each in left]
    total = (steps - begun) * BATCH
    run = Controller(
        Schedule(steps, first=begun, saved=begun, incarnation=life),
        Buffer(batch=BATCH, max_lag=LAG, total=total, next_id=ledger.next_group_id(), live=ids),
        *(task_at, Roller(world, kill_after, skill), world, PublisherOf(world), ledger, world, Silent()),  # type: ignore[arg-type]
        restored=left,
        versions={version.key: version for version in ledger.versions()},
        learn=curriculum.learn_group,
    )
    try:
        run_virtually(run.run())
    finally:
        if kill_after:  # as kill -9 leaves it: what the writer still holds is lost
            shutil.copytree(folder, folder.with_name("killed"))
        ledger.close()
    return admitted


@pytest.mark.parametrize("order", ["shuffled", "frontier", "easy_first", "mixed"])
def test_what_is_retired_never_comes_again_also_after_kills(order, tmp_path):
    rng, steps, folder, lives = random.Random(order), 30, tmp_path / "run", 0
    while True:
        kill_after = rng.randint(8, 20) if lives < 5 else 0
        try:
            live(folder, order, 1.0, steps, kill_after)
            break
        except Killed:
            lives += 1
            shutil.rmtree(folder)
            (tmp_path / "killed").rename(folder)
    with SqliteLedger(folder, mode="read") as ledger:
        counts = ledger.counts()
        assert counts.conserved and counts.trained == steps * BATCH and counts.pending == 0
        retired = [name for _, _, name, rewards in ledger.history() if rewards and min(rewards) == 1]
        assert len(set(retired)) >= 5, "some are passed as a whole"
        envs = [env for _, env, _, _ in ledger.history()]
    assert lives == 5 and 0.5 < envs.count("a") / len(envs) < 0.8


def test_without_retirement_solved_tasks_do_come_again(tmp_path):
    """Else the test above could not fail."""
    admitted = [name for _, name in live(tmp_path / "run", "shuffled", 0.0, 30, 0)]
    assert max(map(admitted.count, ("t23", "t22", "t21"))) > 3


def test_when_every_task_is_retired_the_run_ends_and_says_so(tmp_path):
    with pytest.raises(RunFailed, match=r"every training task is retired.*set steps to what was done"):
        live(tmp_path / "run", "frontier", 0.25, 200, 0, skill=100.0)
    with SqliteLedger(tmp_path / "run", mode="open") as ledger:
        done = ledger.next_step()
        assert done > 0 and ledger.counts().conserved
    assert live(tmp_path / "run", "frontier", 0.25, done, 0) == [], "what the message advises ends it"


# --- whole runs ------------------------------------------------------------------------------------------------------
