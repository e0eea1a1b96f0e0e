"""What the monitor asks of the processes."""

from __future__ import annotations

import asyncio
import io
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill.controller import run_monitor
from tidemill.controller.run_monitor import Monitor, Totals
from tidemill.core.config import load
from tidemill.core.errors import PeerLost
from tidemill.core.types import (
    GREEDY,
    Finish,
    Group,
    Sample,
    Score,
    Scored,
    Span,
    Task,
    Telemetry,
    TrainResult,
    Trajectory,
    Version,
)
from tidemill.observability.console import ProgressDisplay
from tidemill.observability.metrics import StepMetrics
from tidemill.observability.sinks import Fanout
from tidemill.observability.time_breakdown import TRAINER, Account
from tidemill.observability.trace import Trace
from tidemill.run import report
from tidemill.run.planner.plan import plan_of
from tidemill.run.recipe import RunConfig
from tidemill.run.storage.model_folder import architecture_of


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
    monkeypatch.setattr(run_monitor, "ENGINE_S", 0.01)
    well = Telemetry("engine-0", 1, [], {})
    answers = [well, PeerLost("gone"), TimeoutError("silent"), None]
    assert [await Monitor._of(Engine(answer)) for answer in answers] == [well, None, None, None]
    with pytest.raises(ValueError):
        await Monitor._of(Engine(ValueError("a defect")))


class Busy:
    """A process that trains without pause, and takes its time to tell of it."""

    def __init__(self) -> None:
        self.since = time.monotonic()

    async def telemetry(self) -> Telemetry:
        await asyncio.sleep(0.05)
        before, self.since = self.since, time.monotonic()
        return Telemetry("trainer", 1, [Span("train", before, self.since)], {})


async def test_a_step_ends_before_processes_are_asked_and_what_they_tell_of_after_is_the_next_steps(tmp_path) -> None:
    """Else what they did while others were still to answer would be nobody's, in every step."""
    trace = Trace(100)
    watched, trainer = Monitor(Fanout([], print), ProgressDisplay(3, io.StringIO(), "quiet"), trace), Busy()
    watched.attach(trainer, [])  # type: ignore[arg-type]
    begin, ends, told = time.monotonic(), [], []
    for _ in range(3):
        await asyncio.sleep(0.05)
        ends.append(time.monotonic())
        told.append(await watched._times())
    assert [each["time/trainer/train"] for each in told] == pytest.approx([1.0] * 3, abs=1e-3)
    assert sum(each["time/step_s"] for each in told) == pytest.approx(ends[-1] - begin, abs=0.02)
    assert len(trace.spans("trainer")) == 3  # what is kept for the next step is in the trace once


class Counting:
    """An engine that has decoded three times as many rows as were prefilled, in steps of 64 tokens."""

    def __init__(self, process: str, tokens: float = 64.0) -> None:
        self.process, self.tokens, self.steps = process, tokens, 0.0

    async def telemetry(self) -> Telemetry:
        self.steps += 10
        shares = {"generated_tokens": 0.75, "prompt_tokens": 1.0, "cached_tokens": 0.75}
        counters = {name: share * self.tokens * self.steps for name, share in shares.items()}
        return Telemetry(self.process, 2, [], {"steps": self.steps, **counters})


@pytest.mark.parametrize(("name", "threads"), [("2m", False), ("25m", True)])
async def test_threads_are_advised_to_engines_whose_steps_they_are_worth(name: str, threads: bool, monkeypatch) -> None:
    """Small ones wait for their threads."""
    watched = Monitor(Fanout([], print), ProgressDisplay(3, io.StringIO(), "quiet"), Trace(100))
    engines = [Counting("engine-0"), Counting("reference-0", 1e6)]
    watched.attach(Busy(), [SimpleNamespace(engines=engines)])  # type: ignore[arg-type]
    for _ in range(2):
        await watched._times()
    assert report.tokens_per_step(watched.totals) == 64
    starved = {TRAINER: {"train": 1.0, "wait for rollouts": 9.0}, "engine-0": {"generate": 10.0}}
    wall = dict.fromkeys(starved, 10.0)
    watched.totals.time = Account(starved, wall, starved={"generate": 9.0}, starved_s=9.0, in_flight=100.0)
    config = load(RunConfig, [], ["max_lag=1"], {"run_dir": "runs/x", "model": f"new:{name}", "env": "guess"})
    monkeypatch.setattr(report, "usable_cores", lambda: 2)
    policy = architecture_of(config.model)
    assert policy is not None and report.tokens_per_step(Totals()) == 0
    found = report.advice(watched.totals, plan_of(config), policy)
    assert (
        found is not None and found["cause"] == "engines" and ("raise placement.engine_threads" in found["text"]) is threads
    )


def test_a_greedy_baseline_is_no_part_of_what_the_policy_does() -> None:
    def attempt(reward: float, sample: int) -> Trajectory:
        mask = np.array([False, True])
        zero, versions = np.zeros(2, np.float32), np.array([-1, 0], np.int32)
        return Trajectory(np.arange(2, dtype=np.int32), mask, zero, versions, Finish.STOP, Score(reward), sample=sample)

    metrics = StepMetrics()
    run_monitor.describe(metrics, [Group(0, Task("t", "p"), [attempt(0.0, 0), attempt(0.5, 1), attempt(1.0, GREEDY)])])
    assert metrics.take()["reward/mean"] == 0.25


class Told:
    """A sink."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append(metrics)

    def close(self) -> None: ...


async def test_a_step_tells_of_what_it_was_made_of_and_of_what_was_dropped_meanwhile() -> None:
    """Each group once, whatever finished first."""

    def group(number: int, reward: float) -> Group:
        mask, zero = np.array([False, True]), np.zeros(2, np.float32)
        attempt = Trajectory(
            np.arange(2, dtype=np.int32), mask, zero, np.array([-1, 0], np.int32), Finish.STOP, Score(reward)
        )
        return Group(number, Task("t", "p"), [attempt])

    told, groups = Told(), [group(i, reward) for i, reward in enumerate((0.0, 0.5, 1.0, 1.0))]
    watched = Monitor(Fanout([told], print), ProgressDisplay(3, io.StringIO(), "quiet"), Trace(100))
    watched.attach(Busy(), [])  # type: ignore[arg-type]
    for step in (0, 1):
        watched.published(Version(step, fingerprint=f"f{step}"))
    for each in groups:
        watched.rolled_out(each, "zero-variance" if each.id == 2 else None)
    for step, trained in enumerate(([groups[0]], [groups[1], groups[3]])):
        await watched.trained(step, trained, [], TrainResult({"tokens": 1.0}, []), {})
    assert [line["reward/mean"] for line in told.lines] == [0.5, 0.75]


class Scorer:
    """A pool of engines that serve two policies, and tells which rows it was asked to score."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def run(self, work: Any) -> Any:
        return await work(self)

    async def score(self, tokens: np.ndarray, policy: str, temperature: float, top_k: int) -> Scored:
        self.asked.append((policy, int(tokens[0])))
        return Scored(np.zeros(len(tokens), np.float32), Version(0, policy=policy, fingerprint=policy))


async def test_of_two_policies_each_ones_rows_are_probed_and_compared() -> None:
    def row(sample: int, policy: str) -> tuple[Trajectory, Sample]:
        tokens, ones, zero = np.full(2, sample, np.int32), np.ones(2, bool), np.zeros(2, np.float32)
        sources = (Version(0, policy=policy, fingerprint=policy),)
        stamps = np.zeros(2, np.int32)
        attempt = Trajectory(tokens, ones, zero, stamps, Finish.STOP, Score(1.0), sources, sample)
        return attempt, Sample(tokens, ones, zero, stamps, zero, zero, policy, group=0, attempt=sample)

    attempts, samples = zip(*[row(i, "ab"[i % 2]) for i in range(9)], strict=True)
    told, pool, logprobs = Told(), Scorer(), [np.zeros(2, np.float32)] * 9
    watched = Monitor(Fanout([told], print), ProgressDisplay(3, io.StringIO(), "quiet"), Trace(100))
    watched.attach(Busy(), [])  # type: ignore[arg-type]
    for policy in "ab":
        served = Version(0, policy=policy, fingerprint=policy)
        watched.published(served)
        found = await watched.probe(served, samples, logprobs, pool)  # type: ignore[arg-type]
        assert found.tokens > 0 and watched.totals.probe_off == 0
    assert pool.asked and all(policy == "ab"[row % 2] for policy, row in pool.asked)
    await watched.trained(
        0, [Group(0, Task("t", "p"), [*attempts])], samples, TrainResult({"tokens": 18.0}, list(logprobs)), {}
    )
    assert watched.totals.mismatch.matched.tokens == 18, "rows of both policies are of the present version"
    assert told.lines[-1]["version"] == 0.0


async def test_rows_of_an_earlier_incarnation_are_not_compared_as_those_of_the_present_weights() -> None:
    """The trainer was lost, and another one has trained the steps again: its weights may differ in their last bits."""
    tokens, ones, zero, stamps = np.zeros(2, np.int32), np.ones(2, bool), np.zeros(2, np.float32), np.zeros(2, np.int32)
    old, new = Version(0, fingerprint="f"), Version(0, 1, fingerprint="g")
    rows = [Trajectory(tokens, ones, zero, stamps, Finish.STOP, Score(1.0), (each,), i) for i, each in enumerate((old, new))]
    samples = [Sample(tokens, ones, zero, stamps, zero, zero, group=0, attempt=i) for i in range(2)]
    watched = Monitor(Fanout([Told()], print), ProgressDisplay(3, io.StringIO(), "quiet"), Trace(100))
    watched.attach(Busy(), [])  # type: ignore[arg-type]
    watched.published(old)
    watched.published(new)
    await watched.trained(0, [Group(0, Task("t", "p"), rows)], samples, TrainResult({"tokens": 4.0}, [zero, zero]), {})
    assert watched.totals.mismatch.matched.tokens == 2 and watched.totals.mismatch.lagged.tokens == 2


class Lost:
    async def telemetry(self) -> Telemetry:
        raise PeerLost("trainer died")


async def test_a_step_is_told_of_also_when_its_trainer_is_lost_meanwhile() -> None:
    watched, told = Monitor(Fanout([told := Told()], print), ProgressDisplay(3, io.StringIO(), "quiet"), Trace(100)), told
    watched.attach(Lost(), [])  # type: ignore[arg-type]
    watched.published(Version(0, fingerprint="f"))
    await watched.trained(0, [], [], TrainResult({"tokens": 1.0}, []), {})
    assert [line["step"] for line in told.lines] == [1.0]


def test_rewards_are_told_for_each_environment_that_tasks_name() -> None:
    def group(env: str, reward: float) -> Group:
        mask = np.array([False, True])
        zero, versions = np.zeros(2, np.float32), np.array([-1, 0], np.int32)
        attempt = Trajectory(np.arange(2, dtype=np.int32), mask, zero, versions, Finish.STOP, Score(reward))
        return Group(0, Task("t", "p", env=env), [attempt])

    metrics = StepMetrics()
    run_monitor.describe(metrics, [group("a", 0.0), group("a", 1.0), group("b", 1.0), group("", 0.0)])
    found = metrics.take()
    assert {key: value for key, value in found.items() if key.startswith("reward/")} == {
        "reward/mean": 0.5,
        "reward/a": 0.5,
        "reward/b": 1.0,
    }
