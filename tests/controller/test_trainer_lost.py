"""A trainer that is lost at any moment, under virtual time: engines go on, and each sample is trained once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
from virtual_time import run_virtually

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Hooks, Schedule
from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.controller.engine_supervisor import Budget
from tidemill.core.errors import LedgerError, PeerDied, PeerLost, PolicyMismatch, RunFailed
from tidemill.core.interfaces import Capabilities, Trainer
from tidemill.core.types import (
    Finish,
    Group,
    PreparedStep,
    Sample,
    Score,
    Task,
    TrainResult,
    Trajectory,
    Update,
    Version,
)
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.ledger.ledger import SqliteLedger
from tidemill.run.replaceable_trainer import ReplaceableTrainer
from tidemill.run.resume import ResumePoint
from tidemill.run.storage.checkpoint_manifest import Position
from tidemill.run.trainer_restart import TrainerRestart

TOKENS = 8  # of an attempt
SECONDS = {"forward_backward": 6, "apply": 1, "publish": 2, "snapshot": 1, "save": 9, "load": 3, "sleep": 1, "wake": 1}


@dataclass(eq=False)
class Process:
    """A trainer's process and its weights: the groups of each step with their versions, and bits of its own arithmetic."""

    world: World
    number: int
    weights: tuple[tuple[tuple[int, ...], ...], ...] = ()
    bits: int = 0
    gradient: list[tuple[int, ...]] = field(default_factory=list)
    copied: tuple[Any, ...] = ()
    name: str = "trainer"
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def proxy(self) -> Process:
        return self

    def kill(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self, deadline: float = 10.0) -> str:
        self.kill("was stopped")
        return await self.ended

    async def _work(self, name: str) -> None:
        """Take the time of a call, and die at its beginning or in its middle if that was planned."""
        world, seconds = self.world, SECONDS[name]
        world.calls[name] += 1
        if world.turns and name in ("load", "forward_backward", "apply"):
            assert not any(cast(Any, engine).awake.is_set() for engine in world.pool.engines), "both use the device"
        dies = (name, world.calls[name]) in world.deaths
        for share in (0.0, 0.5, 0.5):
            if dies and (share or world.rng.random() < 0.3):
                self.kill("died")
            await asyncio.wait({self.ended}, timeout=seconds * share)
            if self.ended.done():
                raise PeerDied("trainer", self.ended.result())

    async def forward_backward(self, samples: list[Sample], losses: object) -> TrainResult:
        assert not (self.world.turns and any(e.awake.is_set() for e in self.world.engines)), "the engines have the device"
        await self._work("forward_backward")
        self.gradient += [(sample.group, *sample.versions.tolist()) for sample in samples]
        return TrainResult({"tokens": 1.0}, [np.zeros(TOKENS, np.float32) for _ in samples])

    async def apply(self, scale: float) -> dict[str, float]:
        assert self.number not in {cast(Any, engine).reads for engine in self.world.pool.engines}, (
            "weights change under a reader"
        )
        await self._work("apply")
        self.weights, self.gradient = (*self.weights, tuple(self.gradient)), []
        self.bits = hash((self.bits, self.weights[-1], self.world.rounding * self.number))
        return {}

    async def publish(self, version: Version, full: bool = False) -> WeightUpdate:
        assert version.step == len(self.weights), "other weights than these"
        await self._work("publish")
        named = replace(version, fingerprint=f"{self.bits:x}")
        return WeightUpdate(named, (WeightPart("memory", str(self.number)),))

    async def snapshot(self) -> None:
        self.copied = len(self.weights), self.weights, self.bits
        await self._work("snapshot")

    async def sleep(self) -> None:
        await self._work("sleep")

    async def wake(self) -> None:
        await self._work("wake")

    async def save(self, folder: str) -> None:
        await self._work("save")

    async def load(self, folder: str) -> None:
        await self._work("load")
        _, self.weights, self.bits = self.world.disk[folder]


@dataclass(eq=False)
class Engine:
    """Commits weights that it can read, and stamps tokens."""

    world: World
    name: str
    versions: dict[str, Version] = field(default_factory=dict[str, Version])  # by policy
    generated: int = 0
    reads: int | None = None  # the process whose weights it reads
    source: int = 0  # the process that it had its weights from
    held: bool = True  # False: it gave its weights back
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False

    def expect_life(self) -> None:
        if self.lost:
            raise PeerLost(f"{self.name} died")

    async def update(self, update: WeightUpdate) -> Version:
        source = int(update.parts[0].location)
        await self._read(source)
        before = self.versions.get(update.version.policy, Version(-1, policy=update.version.policy))
        assert before.step <= update.version.step and before.key <= update.version.key, "it steps back"
        self.versions[update.version.policy], self.source = update.version, source
        return update.version

    async def _read(self, source: int) -> None:
        self.reads = source
        try:
            await asyncio.sleep(self.world.rng.uniform(0, 3))
            self.expect_life()
            if self.world.processes[source].ended.done():
                raise PolicyMismatch("the weights are gone")
            await asyncio.sleep(self.world.rng.uniform(0, 3))  # they are open: it reads on, whether the trainer lives or not
            self.expect_life()
            self.held = True
        finally:
            self.reads = None

    async def generate(self, asked: tuple[float, str]) -> list[Version]:
        (seconds, policy), stamps = asked, list[Version]()
        assert self.versions.keys() == {*self.world.policies}, "it serves before it has every policy"
        for _ in range(TOKENS):
            await asyncio.sleep(seconds / TOKENS)
            await self.awake.wait()
            self.expect_life()
            assert self.held
            stamps.append(self.versions[policy])
            self.generated += 1
        return stamps

    async def sleep(self, weights: bool) -> None:
        self.expect_life()
        self.awake.clear()
        self.held = not weights

    async def wake(self) -> None:
        self.expect_life()
        if not self.held:
            await self._read(self.source)
        await asyncio.sleep(self.world.rng.uniform(0, 5))
        self.awake.set()


@dataclass(eq=False)
class World:
    """A run whose trainer is lost, as `deaths` and `times` say: (call, how manieth), seconds."""

    seed: int = 0
    steps: int = 6
    batch: int = 3
    max_lag: int = 1
    stream: int = 0
    exact: bool = False
    rounding: int = 1  # a process's arithmetic is its own; 0: all come to the same bits
    every: int = 3  # steps between checkpoints, and between evaluations
    restarts: int = 20
    deaths: tuple[tuple[str, int], ...] = ()
    times: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()  # seconds at which an engine is lost
    turns: bool = False  # trainer and engines share a device
    at_finish: tuple[int, int] | None = (
        None  # the trainer is lost so many rounds of the event loop after this group finishes
    )
    replays: bool = False  # each step trains a group of the step before once more
    policies: tuple[str, ...] = ("policy",)  # an attempt of each in every group
    calls: Counter[str] = field(default_factory=Counter)
    processes: list[Process] = field(default_factory=list)
    disk: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asks, by_group = (), True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engines = [self.engine(f"engine-{i}") for i in range(2)]
        self.pool = EnginePool([self.member(engine) for engine in self.engines])
        self.pool.supervised(lambda name, why: None)

    def engine(self, name: str) -> Engine:
        made = Engine(self, name)
        made.awake.set()
        return made

    @staticmethod
    def member(engine: Engine) -> Member:
        return Member(engine.name, cast(Any, engine), Capabilities(64))

    async def replace(self, at: float) -> None:
        """Lose an engine, and have another one join under its name."""
        await asyncio.sleep(at)
        place = self.rng.randrange(2)
        old = self.engines[place]
        if cast(Any, old) not in self.pool.engines:  # it is joining
            return
        old.lost = True
        old.awake.set()
        self.pool.drop(old.name)
        await asyncio.sleep(self.rng.uniform(0, 10))
        self.engines[place] = new = self.engine(old.name)
        await self.pool.join(self.member(new))

    def lose_after(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self.lose_after, rounds - 1)
        else:
            self.processes[-1].kill("died")

    # roller
    async def rollout(self, group_id: int, task: Task) -> Group:
        rng = random.Random(f"{self.seed} {group_id}")
        seconds = rng.uniform(1, 20)
        rows = [await self._attempt(seconds, policy, sample) for sample, policy in enumerate(self.policies)]
        if self.at_finish is not None and group_id == self.at_finish[0]:
            self.lose_after(self.at_finish[1])
        reward = Score(float(rng.random() < 0.8))
        return Group(group_id, task, [replace(row, outcome=reward) for row in rows])

    async def _attempt(self, seconds: float, policy: str, sample: int) -> Trajectory:
        stamps = await self.pool.run(lambda route: cast(Any, route.generate(cast(Any, (seconds, policy)))))
        assert {stamp.policy for stamp in stamps} == {policy}
        steps, zeros = np.array([v.step for v in stamps], np.int32), np.zeros(TOKENS, np.float32)
        mask, sources = np.ones(TOKENS, bool), tuple(dict.fromkeys(stamps))
        return Trajectory(zeros.astype(np.int32), mask, zeros, steps, Finish.STOP, None, sources, sample)

    # algorithm
    def drop_reason(self, group: Group) -> str | None:
        return "zero-variance" if group.trajectories[0].reward == 0 else None

    def rows(self, groups: list[Group], step: int) -> list[Sample]:
        zeros, ones = np.zeros(TOKENS, np.float32), np.ones(TOKENS, np.float32)
        rows = [(group.id, t) for group in groups for t in group.trajectories]
        return [Sample(t.tokens, t.mask, t.logprobs, t.versions, zeros, ones, group=group_id) for group_id, t in rows]

    def prepare(self, groups: list[Group], step: int, rows: list[Sample], logprobs: object) -> PreparedStep:
        self.lags += [step - (group.oldest or 0) for group in groups[: self.batch]]
        return PreparedStep(list(rows), {}, [Update(list(rows), 1.0)], {})

    # observer
    def rolled_out(self, group: Group, dropped: str | None) -> None: ...
    def published(self, version: Version) -> None: ...
    def evaluated_at(self, step: int, results: object) -> None: ...
    def saving(self, step: int) -> None: ...

    async def trained(self, step: int, *about: object) -> None:
        await asyncio.sleep(2)
        self.reported.append(step)

    # a folder of checkpoints
    async def newest(self) -> tuple[Path, Position] | None:
        step = max((at for at, _, _ in self.disk.values()), default=0)
        return (Path(f"step-{step}"), Position(step, 0, 0)) if step else None

    async def start(self) -> Process:
        await asyncio.sleep(2)
        self.processes.append(Process(self, len(self.processes)))
        return self.processes[-1]

    async def run(self, folder: Path) -> SqliteLedger:
        """To the end, which is checked."""
        ledger = SqliteLedger(folder, durability="process")
        process = ReplaceableTrainer(cast(Any, await self.start()), cast(Any, self.start))
        trainer, point, budget = cast(Trainer, process), ResumePoint(), Budget(self.restarts, 1e9, 0.0)

        async def evaluate(served: Sequence[Version]) -> dict[str, float]:
            assert {version.incarnation for version in served} == {run.incarnation}
            assert [version.policy for version in served] == [*self.policies]
            for _ in range(5):
                assert all([*cast(Any, engine).versions.values()] == [*served] for engine in self.pool.engines)
                await asyncio.sleep(2)
            self.evaluated.append(served[0].step)
            return {}

        async def checkpoint(step: int, next_id: int) -> Any:
            await trainer.snapshot()

            async def write() -> None:
                copied = cast(Process, process.handle).copied
                await trainer.save(f"step-{step}/trainer")
                self.disk[f"step-{step}/trainer"] = copied

            return write()

        async def agree(version: Version, *about: object) -> None:
            assert version.incarnation == run.incarnation
            assert all(cast(Any, engine).versions[version.policy] == version for engine in self.pool.engines)

        async def spend(cause: Exception) -> None:
            await asyncio.sleep(budget.spend(str(cause)))

        restart = TrainerRestart(
            *(process, trainer, self.pool, ledger, cast(Any, self), cast(Any, self)),
            *(point, self.exact, spend, self.notes.append, self.policies),
        )
        buffer = Buffer(batch=self.batch, max_lag=self.max_lag, total=self.steps * self.batch)
        release, released = buffer.release, 0

        async def only_when_served(count: int) -> None:
            nonlocal released
            released += count
            served = [each.step for engine in self.pool.engines for each in cast(Any, engine).versions.values()]
            assert released <= self.batch * min(served, default=self.steps), "its weights are not served"
            await release(count)

        buffer.release = only_when_served  # type: ignore[method-assign]
        every = {"eval_every": self.every, "checkpoint_every": self.every}
        run = Controller(
            Schedule(self.steps, **every, deterministic=self.exact, stream=self.stream),
            buffer,
            lambda i: Task(f"t{i}", "?"),
            self,
            trainer,
            PoolPublisher(trainer, self.pool),
            cast(Any, ledger),
            cast(Any, self),
            cast(Any, Observing(self)),
            Hooks(evaluate, checkpoint, agree, None, process.ends, restart),
            policies=self.policies,
            turns=DeviceTurns(trainer, self.pool) if self.turns else DeviceTurns(),
            again=lambda step: [ledger.load(ledger.groups_of(step - 1)[-1])] if self.replays and step else [],
        )
        replacing = [asyncio.ensure_future(self.replace(at)) for at in self.losses]
        for at in self.times:
            asyncio.get_running_loop().call_later(at, lambda: process.handle.kill("died"))
        try:
            assert await run.run() == self.steps
            for each in replacing:
                each.cancel()
            await asyncio.gather(*replacing, return_exceptions=True)
            assert not [each for each in replacing if not each.cancelled() and each.exception()]
        except BaseException:
            ledger.close()
            raise
        self.check(ledger)
        return ledger

    def check(self, ledger: SqliteLedger) -> None:
        counts, last = ledger.counts(), self.processes[-1]
        assert counts.conserved and counts.trained == self.steps * self.batch and counts.pending == 0
        each = len(self.policies)  # rows of a group
        assert all(
            len({row[0] for row in groups[i : i + each]}) == 1
            for groups in last.weights
            for i in range(0, len(groups), each)
        )
        trained = [[group_id for group_id, *_ in groups[::each]] for groups in last.weights]
        assert trained == [ledger.groups_of(step) + ledger.trained_again(step) for step in range(self.steps)]
        assert not self.replays or sum(map(len, trained)) == self.steps * (self.batch + 1) - 1
        assert min(self.lags) >= 0 and max(self.lags) <= self.max_lag
        sampled = sum(t.sampled for group_id in ledger.recorded() for t in ledger.load(group_id).trajectories)
        if not self.losses:
            assert sum(engine.generated for engine in self.engines) == sampled, "a token was sampled and is in no trajectory"
        assert self.evaluated == [*range(0, self.steps, self.every), self.steps]
        assert self.reported == list(range(self.steps)), "each step is told of, once"
        served = {version for engine in self.pool.engines for version in cast(Any, engine).versions.values()}
        assert {version.step for version in served} <= {self.steps}
        assert {version.policy for version in ledger.versions()} == {*self.policies}
        assert max(step for step, _, _ in self.disk.values()) == self.steps
        assert not self.exact or {version.incarnation for version in ledger.versions()} == {0}


class Observing:
    def __init__(self, world: World) -> None:
        self._world = world
        self.evaluated = world.evaluated_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def lived(world: World) -> World:
    with TemporaryDirectory() as folder:
        run_virtually(world.run(Path(folder))).close()
    return world


PLACES = {
    "the first publication": ("publish", 1),
    "a gradient": ("forward_backward", 4),
    "an update": ("apply", 4),
    "a publication": ("publish", 5),
    "a snapshot": ("snapshot", 1),
    "a checkpoint's files": ("save", 1),
    "the last update": ("apply", 6),
    "the last publication": ("publish", 7),
    "the last checkpoint": ("save", 2),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_lost_in_a_call(place, exact):
    world = lived(World(exact=exact, rounding=not exact, deaths=(PLACES[place],)))
    assert len(world.processes) == 2
    assert not exact or world.processes[-1].bits == undisturbed().bits


TWO = ("a", "b")
IN_TWO = [("publish", 1), ("publish", 2), ("publish", 5), ("publish", 6), ("publish", 14), ("apply", 4), ("save", 1)]


@pytest.mark.parametrize("call", IN_TWO)
def test_lost_in_a_call_of_two_policies(call):
    """Also between the publications of a step's two policies: all of them are published again, none steps back."""
    world = lived(World(policies=TWO, deaths=(call,)))
    assert len(world.processes) == 2


@pytest.mark.parametrize("seed", range(40))
def test_two_policies_whose_trainer_and_engines_are_lost_at_any_time(seed):
    """Engines join between the publications of two policies, too: they sample once they have both."""
    rng = random.Random(seed)
    settings = {"seed": seed, "batch": rng.randint(2, 4), "max_lag": rng.randint(0, 2), "every": rng.choice([2, 3, 100])}
    times = tuple(sorted(rng.uniform(0, 200) for _ in range(rng.choice([1, 2, 5]))))
    losses = tuple(rng.uniform(0, 150) for _ in range(rng.choice([1, 3, 6])))
    world = lived(World(policies=TWO, times=times, losses=losses, replays=rng.random() < 0.3, **settings))
    assert len(world.processes) > 1


IN_TURNS = [("sleep", 1), ("sleep", 4), ("wake", 1), ("wake", 3), ("forward_backward", 4), ("publish", 5), ("snapshot", 1)]


@pytest.mark.parametrize("call", IN_TURNS)
def test_lost_on_a_device_that_engines_share(call):
    """Engines sleep while a new trainer trains the recorded steps again, and sample on once they have its weights."""
    assert len(lived(World(turns=True, deaths=(call,))).processes) == 2


def undisturbed(**given: Any) -> Process:
    return lived(World(exact=True, rounding=0, **given)).processes[-1]


@pytest.mark.parametrize("seed", [*range(60), 111, 318])  # the latter: with all engines, before the others' work was done
def test_lost_at_any_time(seed):
    """While it waits for groups, while some engines have committed and others not, while it is being started again."""
    rng = random.Random(seed)
    exact = seed % 3 == 0
    settings = {"seed": seed, "batch": rng.randint(2, 4), "max_lag": rng.randint(0, 2), "every": rng.choice([2, 3, 100])}
    stream = 0 if exact else rng.choice([0, 1, 2 * TOKENS])
    times = tuple(sorted([rng.uniform(0, 40), *(rng.uniform(0, 150) for _ in range(rng.choice([0, 1, 3, 7])))]))
    losses = tuple(rng.uniform(0, 80) for _ in range(rng.choice([0, 0, 1, 3])))
    settings["turns"] = rng.random() < 0.3
    settings["replays"] = stream == 0 and rng.random() < 0.3
    if settings["turns"]:
        stream, losses = 0, ()
    world = lived(World(exact=exact, rounding=not exact, stream=stream, times=times, losses=losses, **settings))
    assert len(world.processes) > 1
    assert not exact or world.processes[-1].bits == undisturbed(**settings).bits


@pytest.mark.parametrize("rounds", range(10))
def test_lost_as_a_group_is_taken(rounds):
    """It is in the buffer, or among the groups of the next step; never between."""
    world = lived(World(max_lag=0, at_finish=(7, rounds)))
    assert len(world.processes) == 2


def test_lost_twice_in_a_row_and_while_steps_are_trained_again():
    world = lived(World(every=100, deaths=(("apply", 5), ("load", 1), ("forward_backward", 7), ("apply", 9))))
    assert len(world.processes) > 3 and sum("recorded steps again" in note for note in world.notes) >= 2


def test_a_spent_budget_ends_the_run_with_the_first_cause():
    world = World(restarts=2, every=100, deaths=tuple(("forward_backward", n) for n in (4, 5, 6)))
    with pytest.raises(RunFailed, match="trainer died; it was started again 2 times"):
        lived(world)


def test_a_deterministic_run_that_comes_to_other_weights_ends():
    """Each process rounds in its own way: the first step that differs is named."""
    with pytest.raises(LedgerError, match=r"policy@v4 .* was trained again, and is not policy@v4 "):
        lived(World(exact=True, rounding=1, deaths=(("apply", 6),)))
