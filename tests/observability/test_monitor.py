"""What the monitor asks of the processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tidemill import monitor
from tidemill.monitor import Monitor
from tidemill.observability.metrics import StepMetrics
from tidemill.protocols import PeerLost
from tidemill.types import GREEDY, Finish, Group, Score, Task, Telemetry, Trajectory


class Engine:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def telemetry(self) -> Telemetry:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


async def test_an_engine_that_is_lost_or_silent_holds_nobody_up_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "ENGINE_S", 0.01)
    well = Telemetry("engine-0", 1, [], {})
    answers = [well, PeerLost("gone"), TimeoutError("silent"), None]
    assert [await Monitor._of(Engine(answer)) for answer in answers] == [well, None, None, None]
    with pytest.raises(ValueError):
        await Monitor._of(Engine(ValueError("a defect")))


def test_a_greedy_baseline_is_no_part_of_what_the_policy_does() -> None:
    def attempt(reward: float, sample: int) -> Trajectory:
        mask = np.array([False, True])
        zero, versions = np.zeros(2, np.float32), np.array([-1, 0], np.int32)
        return Trajectory(np.arange(2, dtype=np.int32), mask, zero, versions, Finish.STOP, Score(reward), sample=sample)

    metrics = StepMetrics()
    monitor.describe(metrics, [Group(0, Task("t", "p"), [attempt(0.0, 0), attempt(0.5, 1), attempt(1.0, GREEDY)])])
    assert metrics.take()["reward/mean"] == 0.25


def test_rewards_are_told_for_each_environment_that_tasks_name() -> None:
    def group(env: str, reward: float) -> Group:
        mask = np.array([False, True])
        zero, versions = np.zeros(2, np.float32), np.array([-1, 0], np.int32)
        attempt = Trajectory(np.arange(2, dtype=np.int32), mask, zero, versions, Finish.STOP, Score(reward))
        return Group(0, Task("t", "p", env=env), [attempt])

    metrics = StepMetrics()
    monitor.describe(metrics, [group("a", 0.0), group("a", 1.0), group("b", 1.0), group("", 0.0)])
    found = metrics.take()
    assert {key: value for key, value in found.items() if key.startswith("reward/")} == {
        "reward/mean": 0.5,
        "reward/a": 0.5,
        "reward/b": 1.0,
    }
