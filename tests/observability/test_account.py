"""The account of time, and the advice that follows from it: the real controller under virtual time, with planted causes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from virtual_time import run_virtually

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Hooks, Schedule
from tidemill.core.types import Finish, Group, PreparedStep, Score, Span, Task, TrainResult, Trajectory, Update, Version
from tidemill.observability.bottleneck_advisor import Advice, Setup, advise
from tidemill.observability.time_breakdown import EPISODE, EVALUATE, REWARD, WAIT, Account, account
from tidemill.observability.timeline import IDLE, REST, Beside, Idle, Timeline
from tidemill.observability.trace import merged


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def seconds(spans: list[Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + span.end - span.start
    return found


def idle(spans: list[Span], begin: float, end: float) -> list[Span]:
    """What a process that did this would tell of the rest."""
    edges = [begin, *(t for stretch in merged(spans) for t in stretch), end]
    return [Span(IDLE, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def test_a_timeline_has_no_gaps_and_counts_the_innermost() -> None:
    clock = Clock()
    line = Timeline(clock)
    clock.now = 1.0
    with line.phase("a"):
        clock.now = 3.0
        with line.phase("b"):
            clock.now = 7.0
            assert seconds(line.take()) == {REST: 1.0, "a": 2.0, "b": 4.0}
            clock.now = 8.0
        clock.now = 8.5
    clock.now = 10.0
    assert seconds(line.take()) == {"b": 1.0, "a": 0.5, REST: 1.5}
    assert line.take() == []


def test_a_phase_that_raises_ends() -> None:
    clock = Clock()
    line = Timeline(clock)
    with pytest.raises(KeyError), line.phase("a"):
        clock.now = 1.0
        raise KeyError
    clock.now = 3.0
    assert seconds(line.take()) == {"a": 1.0, REST: 2.0}


def test_what_is_open_is_cut_and_goes_on() -> None:
    clock = Clock()
    beside = Beside(clock)
    with beside.span("a", group=1):
        clock.now = 2.0
        with beside.span("b"):
            clock.now = 3.0
        assert seconds(beside.take()) == {"b": 1.0, "a": 3.0}
        clock.now = 5.0
    (rest,) = beside.take()
    assert (rest.name, rest.start, rest.end, rest.args) == ("a", 3.0, 5.0, {"group": 1})


def test_what_ends_in_another_thread_is_one_span_and_ends_once() -> None:
    clock = Clock()
    beside = Beside(clock)
    key = beside.begin("a")
    clock.now = 2.0
    beside.end(key)
    beside.end(key)
    assert beside.take() == [Span("a", 0.0, 2.0)] and beside.take() == []


def test_idle_is_when_nothing_is_asked() -> None:
    clock = Clock()
    found = Idle(clock)
    clock.now = 2.0
    with found.asked():
        clock.now = 3.0
        with found.asked():
            clock.now = 4.0
        assert found.take() == [Span(IDLE, 0.0, 2.0)]
        clock.now = 5.0
    clock.now = 7.0
    assert found.take() == [Span(IDLE, 5.0, 7.0)]  # what goes on is cut
    clock.now = 8.0
    assert found.take() == [Span(IDLE, 7.0, 8.0)]


def test_nobody_waits_who_does_not_say_that_nothing_was_asked_of_him() -> None:
    """What a process spends without a name stays without one, and is missing from the shares."""
    loop = [Span("train", 0, 10)]
    pools = {
        "trainer": [Span("train", 0, 6), Span(IDLE, 9, 10)],
        "engine-0": [Span("generate", 0, 5), Span(IDLE, 5, 9.5)],
        "reference-0": [Span(IDLE, 0, 8)],
    }
    found = account(0.0, 10.0, loop, [Span(EPISODE, 0, 7)], pools)
    assert found.overall() == pytest.approx({"generate": 0.25, "train": 0.3, "sync": 0, "wait": 0.275})
    shares = found.shares()
    assert {name: kinds[REST] for name, kinds in shares.items()} == pytest.approx(
        {"controller": 0, "trainer": 0.3, "engine-0": 0.05, "reference-0": 0.2}
    )
    assert shares["trainer"][WAIT + "controller"] == pytest.approx(0.1)
    assert shares["engine-0"][WAIT + "environment"] == pytest.approx(0.2)


def test_every_moment_of_every_process_is_accounted_for_once() -> None:
    loop = [Span("rollouts", 0, 4), Span("ledger", 4, 5), Span("train", 5, 9), Span("publication", 9, 10)]
    beside = [Span(EPISODE, 0, 2), Span(REWARD, 2, 4), Span(EVALUATE, 9, 9.5)]
    pools = {
        "trainer": [Span("train", 5.5, 8), Span("apply", 8, 9), Span("publish", 9.75, 10)],
        "engine-0": [Span("generate", 0.5, 1.5), Span("stage", 1, 2.5), Span("generate", 8, 11)],
    }
    pools = {name: [*spans, *idle(spans, 0, 12)] for name, spans in pools.items()}
    whole = account(0.0, 10.0, loop, beside, pools)
    whole.add(account(10.0, 12.0, [], [], pools))
    assert whole.both == 1 and whole.wall["controller"] == 12  # both train and generate from 8 to 9
    found = account(0.0, 10.0, loop, beside, pools).seconds
    assert found["controller"] == {"rollouts": 4, "ledger": 1, "train": 4, "publication": 1, REST: 0}
    waits = {"evaluation": 0.5, "reference": 0, "rollouts": 4, "ledger": 1, "controller": 0.5, "engines": 0.25}
    waited = {WAIT + whom: s for whom, s in waits.items()}
    assert found["trainer"] == {"train": 3.5, "sync": 0.25, "handover": 0, REST: 0, **waited}
    assert found["engine-0"] == {
        "generate": 3,
        "sync": 1,
        "check": 0,
        "yield": 0,
        "asleep": 0,
        WAIT + "reward": 1.5,
        WAIT + "environment": 0.5,
        WAIT + "evaluation": 0,
        WAIT + "trainer": 4,
        REST: 0,
    }
    assert all(sum(kinds.values()) == pytest.approx(10) for kinds in found.values())


def test_engines_that_serve_the_reference_are_waited_for() -> None:
    """They neither generate nor keep rollouts waiting: what they do is in the trainer's waits, and in no engine's."""
    loop = [Span("rollouts", 0, 4), Span("train", 4, 10)]
    pools = {
        "trainer": [Span("train", 8, 10)],
        "engine-0": [Span("generate", 0, 3)],
        "reference-0": [Span("generate", 4, 6)],
        "reference-1": [Span("generate", 4, 7)],
    }
    pools = {name: [*spans, *idle(spans, 0, 10)] for name, spans in pools.items()}
    found = account(0.0, 10.0, loop, [], pools)
    waits = {WAIT + "evaluation": 0, WAIT + "reference": 3, WAIT + "rollouts": 4, WAIT + "controller": 1}
    assert found.seconds["trainer"] == {"train": 2, "sync": 0, "handover": 0, REST: 0, **waits}
    assert found.seconds["reference-0"] == {"score": 2, "check": 0, "yield": 0, "asleep": 0, WAIT + "trainer": 8, REST: 0}
    assert found.overall() == {"generate": 0.15, "train": 0.1, "sync": 0.0, "wait": 0.75}
    found = account(0.0, 10.0, [Span("rollouts", 0, 2), Span("train", 2, 10)], [], pools)
    advice = advise(found, Setup(max_lag=0, slots=4))
    assert advice is not None and advice.cause == "reference" and "raise placement.reference_engines" in str(advice)


class Told:
    """A ledger that is told everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@dataclass
class World(Told):
    """Engines, verifiers, environments, trainer and publications that take the planted times."""

    sample_s: float = 4.0
    judge_s: float = 0.1
    act_s: float = 0.0  # in the environment, of each episode
    train_s: float = 4.0
    stage_s: float = 0.1
    straggler: float = 1.0  # every seventh group takes so many times as long to sample
    evaluate_s: float = 0.0
    record_s: float = 0.0
    serving: Version = field(default_factory=lambda: Version(0, fingerprint="f0"))
    spans: dict[str, list[Span]] = field(default_factory=lambda: {"trainer": [], "engine-0": []})
    asks, by_group = (), True

    def __post_init__(self) -> None:
        self.clock = lambda: asyncio.get_event_loop().time()
        self.found: list[Account] = []
        self.begin = 0.0

    def attach(self) -> None:
        clock = asyncio.get_running_loop().time
        self.line, self.beside, self.clock = Timeline(clock), Beside(clock), clock

    async def busy(self, process: str, name: str, seconds: float) -> None:
        start = self.clock()
        await asyncio.sleep(seconds)
        self.spans[process].append(Span(name, start, self.clock()))

    async def rollout(self, group_id: int, task: Task) -> Group:
        version = self.serving
        with self.beside.span(EPISODE):
            await asyncio.sleep(self.act_s)
            await self.busy("engine-0", "generate", self.sample_s * (self.straggler if group_id % 7 == 0 else 1))
        with self.beside.span(REWARD):
            await asyncio.sleep(self.judge_s)
        steps, zeros = np.full(2, version.step, np.int32), np.zeros(2, np.float32)
        row = Trajectory(np.zeros(2, np.int32), np.ones(2, bool), zeros, steps, Finish.STOP, Score(0.0), (version,))
        return Group(group_id, task, [row])

    async def forward_backward(self, samples: Any, losses: Any) -> TrainResult:
        await self.busy("trainer", "train", self.train_s)
        return TrainResult({}, [])

    async def apply(self, scale: float) -> dict[str, float]:
        return {}

    async def publish(self, version: Version) -> Version:
        await self.busy("engine-0", "stage", self.stage_s)
        self.serving = Version(version.step, fingerprint=f"f{version.step}")
        return self.serving

    async def evaluate(self, served: Sequence[Version]) -> dict[str, float]:
        with self.beside.span(EVALUATE):
            await asyncio.sleep(self.evaluate_s)
        return {"accuracy": 0.0}

    def drop_reason(self, group: Group) -> None:
        return None

    def rows(self, *_: Any) -> Any:
        return []

    def prepare(self, *_: Any) -> Any:
        return PreparedStep([], {}, [Update([], 1.0)], {})

    async def trained(self, *_: Any) -> None:
        await asyncio.sleep(self.record_s)
        now = self.clock()
        told = {name: [*spans, *idle(spans, 0, now)] for name, spans in self.spans.items()}
        self.found.append(account(self.begin, now, self.line.take(), self.beside.take(), told))
        self.begin = now


def advice_for(max_lag: int, batch: int = 8, steps: int = 40, **planted: float) -> tuple[Advice, Account, float]:
    """What is advised to such a run, its account, and its seconds."""
    world: Any = World(**planted)

    async def run() -> float:
        world.attach()
        buffer = Buffer(batch=batch, max_lag=max_lag, total=steps * batch)
        hooks = Hooks(evaluate=world.evaluate) if world.evaluate_s else Hooks()
        schedule = Schedule(steps, eval_every=1 if world.evaluate_s else 0)
        controller = Controller(
            schedule,
            buffer,
            lambda group_id: Task(f"task-{group_id}", "", {}, "planted"),
            *(world, world, world, Told(), world, world),  # type: ignore[arg-type]
            hooks=hooks,
            timeline=world.line,
        )
        await controller.run()
        return world.clock()

    spent = run_virtually(run())
    total = Account()
    for each in world.found[2:]:  # the pipeline has filled
        total.add(each)
    found = advise(total, Setup(max_lag=max_lag, slots=batch * (max_lag + 1), cores=2))
    assert found is not None
    return found, total, spent


CAUSES: dict[str, tuple[str, int, dict[str, float]]] = {
    "a trainer that is never idle": ("trainer", 1, {"train_s": 10.0, "sample_s": 2.0}),
    "a straggler": ("straggler", 1, {"straggler": 15.0}),
    "a slow reward": ("reward", 1, {"judge_s": 30.0}),
    "a slow environment": ("environment", 1, {"act_s": 30.0}),
    "a starved trainer, one after the other": ("turns", 0, {"sample_s": 10.0, "train_s": 10.0}),
    "a starved trainer, slow engines": ("engines", 1, {"sample_s": 30.0, "train_s": 2.0}),
    "slow publications": ("sync", 2, {"stage_s": 20.0, "sample_s": 1.0}),
    "long evaluations": ("evaluation", 2, {"evaluate_s": 30.0, "sample_s": 1.0}),
    "a controller with much to record": ("controller", 2, {"record_s": 10.0, "sample_s": 1.0}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_what_was_planted_is_named(name: str) -> None:
    cause, max_lag, planted = CAUSES[name]
    found, total, _ = advice_for(max_lag, **planted)
    assert found.cause == cause, (str(found), total.shares())
    for kinds in total.shares().values():
        assert sum(kinds.values()) == pytest.approx(1) and kinds.get(REST, 0.0) < 0.02, kinds


@pytest.mark.parametrize(
    ("name", "mended"),
    [
        ("a slow reward", {"judge_s": 0.1}),
        ("a slow environment", {"act_s": 0.0}),
        ("a starved trainer, one after the other", {"max_lag": 1}),
        ("slow publications", {"stage_s": 0.1}),
        ("long evaluations", {"evaluate_s": 0.0}),
    ],
)
@pytest.mark.runs
def test_it_is_faster_when_the_advice_is_followed_and_not_by_more_than_it_says(name: str, mended: dict[str, Any]) -> None:
    _, max_lag, planted = CAUSES[name]
    found, _, before = advice_for(max_lag, **planted)
    _, _, after = advice_for(**{"max_lag": max_lag, **planted, **mended})
    assert 1.3 < before / after < found.gain * 1.15


def test_shares_add_up_and_count_an_instant_once() -> None:
    loop = [Span("rollouts", 0, 2), Span("train", 2, 8), Span("publication", 8, 10)]
    pools = {
        "engine-0": [Span("generate", 0, 6), Span("stage", 5, 7), Span("generate", 20, 30)],
        "trainer": [Span("forward", 2, 4), Span("train", 4, 5), Span("train", 4, 7), Span("publish", 6, 8)],
    }
    pools = {name: [*spans, *idle(spans, 0, 30)] for name, spans in pools.items()}
    found = account(0, 10, loop, [Span(REWARD, 6, 9)], pools)
    shares = found.shares()
    engine = {kind: share for kind, share in shares["engine-0"].items() if share > 0}
    assert engine == pytest.approx({"generate": 0.6, "sync": 0.1, WAIT + "reward": 0.2, WAIT + "trainer": 0.1})
    trainer = {kind: share for kind, share in shares["trainer"].items() if share > 0}
    assert trainer == pytest.approx({"train": 0.5, "sync": 0.1, WAIT + "rollouts": 0.2, WAIT + "engines": 0.2})
    assert found.overall() == pytest.approx({"generate": 0.3, "train": 0.25, "sync": 0.1, "wait": 0.35})


def test_without_a_step_there_is_nothing_to_tell() -> None:
    assert advise(Account(), Setup(1, 16)) is None and Account().overall() == {}


def test_a_judge_that_fails_comes_before_all_speed() -> None:
    _, max_lag, planted = CAUSES["a starved trainer, slow engines"]
    _, total, _ = advice_for(max_lag, **planted)
    found = advise(total, Setup(max_lag, 16, cores=2, paused=0.96, failed="reward raised KeyError: 'answer'"))
    assert found is not None and found.cause == "judging"
    assert "nothing was admitted 96% of the time" in str(found) and "KeyError: 'answer'; mend that first" in str(found)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("a trainer that is never idle", {"trainer_threads": 1, "shared": True}, "raise placement.trainer_threads (now 1)"),
        ("a trainer that is never idle", {"trainer_threads": 2, "shared": True}, "what this machine can train"),
        ("a trainer that is never idle", {"trainer_threads": 1}, "what this machine can train"),
        ("a starved trainer, slow engines", {"engine_threads": 1, "shared": True}, "raise placement.engine_threads (now 1)"),
        ("a starved trainer, slow engines", {"engine_threads": 2, "shared": True}, "more of the machine"),
        ("a starved trainer, slow engines", {"engine_threads": 1}, "more of the machine"),
        ("a starved trainer, slow engines", {"shared": True, "engine_step": 2e9}, "raise placement.engine_threads (now 1)"),
        (
            "a starved trainer, slow engines",
            {"shared": True, "engine_step": 2e8},
            "not more threads: their steps are too small",
        ),
        (
            "a starved trainer, slow engines",
            {"cores": 4, "engine_step": 2e9},
            "placement.engines or placement.engine_threads",
        ),
        (
            "a starved trainer, slow engines",
            {"cores": 4, "engine_step": 2e8},
            "2 of 4 cores are free: raise placement.engines (",
        ),
    ],
)
def test_threads_are_advised_where_cores_are_shared(name: str, more: dict[str, Any], said: str) -> None:
    _, max_lag, planted = CAUSES[name]
    _, total, _ = advice_for(max_lag, **planted)
    assert said in str(advise(total, Setup(max_lag, 16, **{"cores": 2, **more})))
