"""The controller under virtual time, over fakes of 10 lines: order, lag bound, conservation, crash, hang, shutdown."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from virtual_time import Deadlock, VirtualTimeLoop, run_virtually

from tidemill.controller.admission_buffer import Buffer
from tidemill.controller.controller import Controller, Hooks, Schedule
from tidemill.core.errors import PolicyMismatch, RunFailed
from tidemill.core.types import (
    Finish,
    Group,
    InfraError,
    PreparedStep,
    Score,
    Task,
    TrainResult,
    Trajectory,
    Update,
    Version,
)
from tidemill.observability.stall_report import open_waits


@dataclass
class World:
    """A virtual rollout pool, trainer and ledger that record what happened."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    gen_s: float = 20.0
    sigma: float = 0.8
    train_s: float = 10.0
    sync_s: float = 1.0
    drop_share: float = 0.0
    staggered_s: float = 0.0
    serving: Version = field(default_factory=lambda: Version(-1))
    weights: int = 0
    fates: dict[int, list[str]] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    torn: int = 0
    saved: list[int] = field(default_factory=list)
    writing: bool = False
    write_s: float = 5.0
    broken: bool = False
    evaluated: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    # roller
    async def rollout(self, group_id: int, task: Task) -> Group:
        stamps: list[Version] = []
        total, n = self.gen_s * np.exp(self.rng.gauss(0, self.sigma)), 8
        for _ in range(n):
            await asyncio.sleep(total / n)
            stamps.append(self.serving)
        steps = np.array([v.step for v in stamps], np.int32)
        reward = 0.0 if self.rng.random() < self.drop_share else 1.0
        sources = tuple(sorted(set(stamps)))
        row = Trajectory(
            np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), steps, Finish.STOP, Score(reward), sources
        )
        return Group(group_id, task, [row])

    # trainer and publisher
    async def forward_backward(self, samples, losses) -> TrainResult:
        self.log.append(f"gradient {self.weights}")
        await asyncio.sleep(self.train_s)
        return TrainResult({}, [])

    async def apply(self, scale: float) -> dict[str, float]:
        self.weights += 1
        return {}

    async def publish_to_engines(self, version: Version) -> Version:
        before = self.weights
        await asyncio.sleep(self.sync_s)
        served = Version(version.step, version.incarnation, fingerprint=f"f{version.step}")
        if self.staggered_s:  # some engines serve it already while others have yet to commit
            self.serving = served
            await asyncio.sleep(self.staggered_s)
        self.torn += before != self.weights
        self.serving = served
        return self.serving

    async def write(self, step: int) -> None:
        self.writing = True
        await asyncio.sleep(self.write_s)
        if self.broken:
            raise OSError("the disk is full")
        self.writing = False
        self.saved.append(step)

    # ledger
    def admit(self, group_id: int, task: Task) -> None:
        assert group_id not in self.fates
        self.fates[group_id] = []

    def finish(self, group: Group) -> None:
        pass

    def drop(self, group_id: int, reason: str) -> None:
        self.fates[group_id].append(reason)

    def begin_step(self, step: int, incarnation: int, group_ids, again=()) -> None:
        self.log.append(f"begin {step}")
        for group_id in group_ids:
            self.fates[group_id].append("trained")

    def end_step(self, step: int, incarnation: int, metrics) -> None:
        self.log.append(f"end {step}")

    def publish(self, version: Version) -> None:
        self.log.append(f"published {version.step}")

    def evaluation(self, step: int, results) -> None:
        pass

    def event(self, kind: str, detail: dict) -> None:
        pass

    # algorithm
    asks, by_group = (), True

    def drop_reason(self, group: Group) -> str | None:
        return "zero-variance" if group.trajectories[0].reward == 0 else None

    def rows(self, groups, step):
        return []

    def prepare(self, groups, step, rows, logprobs):
        self.lags += [self.weights - (g.oldest or 0) for g in groups]
        return PreparedStep([], {}, [Update([], 1.0)], {})


class PublisherOf:
    def __init__(self, world: World) -> None:
        self.world = world

    async def publish(self, version: Version) -> Version:
        return await self.world.publish_to_engines(version)


class Silent:
    def rolled_out(self, group: Group, dropped: str | None) -> None: ...
    async def trained(self, step, groups, samples, result, metrics) -> None: ...
    def published(self, version: Version) -> None: ...
    def evaluated(self, step: int, results) -> None: ...
    def saving(self, step: int) -> None: ...


def controller(
    world: World, *, steps: int, batch: int, max_lag: int, window: int = 1, roller=None, **schedule
) -> Controller:
    async def evaluate(served: Sequence[Version]) -> dict[str, float]:
        before = world.serving
        await asyncio.sleep(30)
        assert world.serving == before == served[0], "the evaluated version was replaced while it was evaluated"
        world.evaluated.append(served[0].step)
        return {}

    async def checkpoint(step: int, next_id: int) -> Coroutine[None, None, None]:
        assert not world.writing, "one at a time"
        await asyncio.sleep(1)
        return world.write(step)

    return Controller(
        Schedule(steps, **schedule),
        Buffer(batch=batch, max_lag=max_lag, window=window, total=steps * batch),
        lambda i: Task(f"t{i}", "?"),
        roller or world,
        world,  # type: ignore[arg-type]
        PublisherOf(world),
        world,
        world,
        Silent(),
        Hooks(evaluate, checkpoint),
    )


@pytest.mark.parametrize("seed", range(60))
def test_nothing_trained_on_is_older_than_max_lag_and_every_group_has_one_fate(seed):
    rng = random.Random(seed)
    batch, lag, steps = rng.randint(1, 6), rng.randint(0, 4), rng.randint(3, 25)
    world = World(
        rng,
        gen_s=rng.choice([1, 20, 100]),
        sigma=rng.choice([0.1, 0.8, 1.5]),
        train_s=rng.choice([0, 1, 10, 60]),
        sync_s=rng.choice([0, 1, 15]),
        drop_share=rng.choice([0, 0.3]),
        staggered_s=rng.choice([0, 3, 40]),
    )
    run = controller(world, steps=steps, batch=batch, max_lag=lag, window=rng.randint(1, lag * batch + 1))
    assert run_virtually(run.run()) == steps
    assert max(world.lags) <= lag and min(world.lags) >= 0
    assert world.torn == 0
    assert all(len(fate) == 1 for fate in world.fates.values()), "a group without a fate, or with two"
    assert sum(fate == ["trained"] for fate in world.fates.values()) == steps * batch
    assert sorted(world.fates) == list(range(len(world.fates)))


def test_the_bound_is_tight():
    """With slow generation, lag reaches max_lag; a bound that is never reached would prove nothing."""
    world = World(gen_s=100, sigma=1.5, train_s=1, sync_s=0)
    run_virtually(controller(world, steps=40, batch=4, max_lag=3, window=1).run())
    assert max(world.lags) == 3


def test_what_is_trained_once_more_is_beyond_the_bound_and_takes_no_slots():
    world, kept, composed = World(gen_s=5, sigma=0.1), dict[int, list[Group]](), list[tuple[int, list[int], list[int]]]()
    run = controller(world, steps=8, batch=3, max_lag=1)
    begin, rows = world.begin_step, world.rows
    world.begin_step = lambda s, i, ids, again: (composed.append((s, list(ids), list(again))), begin(s, i, ids))
    world.rows = lambda groups, step: (kept.setdefault(step, list(groups)), rows(groups, step))[1]
    run.again = lambda step: kept[step - 5][:2] if step >= 5 else ()
    assert run_virtually(run.run()) == 8
    assert max(world.lags) > 1 and all(fate == ["trained"] for fate in world.fates.values() if fate)
    assert sum(fate == ["trained"] for fate in world.fates.values()) == 8 * 3
    assert [again for step, _, again in composed] == [[]] * 5 + [[g.id for g in kept[s][:2]] for s in range(3)]
    assert all([g.id for g in kept[step]] == ids + again for step, ids, again in composed)
    unknown = controller(World(), steps=2, batch=2, max_lag=1)
    stranger = asyncio.run(World(gen_s=0, serving=Version(0, 7, fingerprint="of another run")).rollout(0, Task("t", "?")))
    unknown.again = lambda step: [stranger]
    with pytest.raises(PolicyMismatch, match="never published"):
        run_virtually(unknown.run())


def test_max_lag_zero_is_on_policy():
    world = World()
    run_virtually(controller(world, steps=10, batch=4, max_lag=0).run())
    assert set(world.lags) == {0}


def test_asynchrony_saves_time():
    def seconds(max_lag: int) -> float:
        loop = VirtualTimeLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(controller(World(sigma=0.1), steps=30, batch=4, max_lag=max_lag).run())
        return loop.now

    assert seconds(1) < 0.75 * seconds(0)


def test_a_step_is_in_the_ledger_before_its_gradient_and_published_after_its_update():
    world = World()
    run_virtually(controller(world, steps=3, batch=2, max_lag=1).run())
    order = ["published 0", "begin 0", "end 0", "published 1", "end 1", "published 2", "end 2", "published 3"]
    assert [entry for entry in world.log if entry in order] == order
    for s in range(3):
        assert world.log.index(f"begin {s}") < world.log.index(f"gradient {s}") < world.log.index(f"end {s}")


def test_a_publication_is_under_way_while_the_next_gradient_is_computed():
    world = World(gen_s=1, train_s=10, sync_s=8)

    async def timed() -> float:
        await controller(world, steps=10, batch=2, max_lag=2).run()
        return asyncio.get_running_loop().time()

    took = run_virtually(timed())
    for s in range(2, 10):
        order = [world.log.index(entry) for entry in (f"end {s - 1}", f"gradient {s}", f"published {s}", f"end {s}")]
        assert order == sorted(order), (
            "engines fetch weights while the next gradient is computed, and have them before it counts"
        )
    assert took < 10 * world.train_s + 3 * world.sync_s + 30, (
        "of the publications only the first and the last are waited for"
    )


def test_evaluation_is_pinned_to_one_version():
    world = World(sync_s=0)
    run_virtually(controller(world, steps=6, batch=2, max_lag=2, eval_every=2).run())
    assert world.evaluated == [0, 2, 4, 6]


def test_stop_ends_after_the_step_and_saves_it():
    world = World()
    run = controller(world, steps=1000, batch=2, max_lag=1, checkpoint_every=100)

    async def main() -> int:
        asyncio.get_running_loop().call_later(400, run.stop)
        return await run.run()

    done = run_virtually(main())
    assert 0 < done < 1000
    assert world.saved == [done]


def test_checkpoints_come_when_due_and_at_the_end():
    world = World()
    run_virtually(controller(world, steps=7, batch=1, max_lag=0, checkpoint_every=3).run())
    assert world.saved == [3, 6, 7]


def test_checkpoints_are_written_beside_the_next_steps_one_at_a_time_and_all_before_the_end():
    def seconds(write_s: float) -> float:
        world, loop = World(sigma=0.1, write_s=write_s), VirtualTimeLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(controller(world, steps=8, batch=2, max_lag=1, checkpoint_every=2).run())
        assert world.saved == [2, 4, 6, 8]
        return loop.now

    at_once = seconds(0)
    assert seconds(15) == at_once, "nobody waits for one that is written within two steps"
    assert seconds(500) >= at_once + 1500, "one that takes longer is waited for: by the next one, and by the end"


@pytest.mark.parametrize("write_s, said", [(0.5, []), (500, [4])])
def test_it_is_said_what_an_end_waits_for(write_s, said):
    world, heard, waits = World(write_s=write_s), [], []
    run = controller(world, steps=4, batch=2, max_lag=1, checkpoint_every=2)

    class Hears(Silent):
        def saving(self, step: int) -> None:
            heard.append(step)
            waits.extend((wait.peer, wait.what) for wait in open_waits())

    run.observer = Hears()
    run_virtually(run.run())
    assert heard == said and world.saved == [2, 4] and not open_waits()
    assert waits == [("the disk", "checkpoint of step 4")] * len(said)


def test_nothing_is_said_after_a_failed_end():
    world, heard = World(write_s=32, broken=True), []  # a second after the last evaluation
    run = controller(world, steps=1, batch=1, max_lag=0)

    class Hears(Silent):
        def saving(self, step: int) -> None:
            heard.append(step)

    run.observer = Hears()

    async def and_on() -> None:
        with pytest.raises(OSError, match="the disk is full"):
            await run.run()
        await asyncio.sleep(60)

    run_virtually(and_on())
    assert not heard


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_ones():
    world = World(broken=True)
    with pytest.raises(OSError, match="the disk is full"):
        run_virtually(controller(world, steps=100, batch=2, max_lag=1, checkpoint_every=2).run())
    assert 2 <= world.weights <= 3 and world.saved == []


def test_a_crash_leaves_no_write_behind():
    world = World(write_s=1e9)
    run = controller(world, steps=100, batch=2, max_lag=1, checkpoint_every=1, roller=LateExplosion(world))
    with pytest.raises(RuntimeError, match="env exploded"):
        run_virtually(run.run())
    assert world.weights > 0 and world.writing and world.saved == []


def test_steps_that_were_trained_again_are_saved_at_once():
    world = World(weights=5)
    run = controller(world, steps=7, batch=2, max_lag=1, first=5, saved=2, incarnation=1)
    run.buffer = Buffer(batch=2, max_lag=1, total=4, next_id=10)
    run_virtually(run.run())
    assert world.saved == [5, 7]
    world = World(weights=5)
    run = controller(world, steps=7, batch=2, max_lag=1, first=5, saved=5)
    run.buffer = Buffer(batch=2, max_lag=1, total=4, next_id=10)
    run_virtually(run.run())
    assert world.saved == [7], "it stands already"


class Exploding:
    async def rollout(self, group_id: int, task: Task) -> Group:
        await asyncio.sleep(1)
        raise RuntimeError("env exploded")


class LateExplosion:
    def __init__(self, world: World) -> None:
        self.world = world

    async def rollout(self, group_id: int, task: Task) -> Group:
        if self.world.weights:
            raise RuntimeError("env exploded")
        return await self.world.rollout(group_id, task)


class Stuck:
    async def rollout(self, group_id: int, task: Task) -> Group:
        return await asyncio.get_running_loop().create_future()


class Forger(World):
    async def rollout(self, group_id: int, task: Task) -> Group:
        group = await super().rollout(group_id, task)
        t = group.trajectories[0]
        t.sources = tuple(Version(v.step, v.incarnation, v.policy, "forged") for v in t.sources)
        return group


class Unscorable(World):
    async def rollout(self, group_id: int, task: Task) -> Group:
        group = await super().rollout(group_id, task)
        group.trajectories[0].outcome = InfraError("ZeroDivisionError: division by zero")
        return group

    def drop_reason(self, group: Group) -> str | None:
        return "unscored"


def test_a_crash_stops_the_run_and_is_what_the_user_reads():
    with pytest.raises(RuntimeError, match="env exploded"):
        run_virtually(controller(World(), steps=3, batch=2, max_lag=1, roller=Exploding()).run())


def test_a_hang_is_an_error_under_virtual_time():
    with pytest.raises(Deadlock):
        run_virtually(controller(World(), steps=3, batch=2, max_lag=1, roller=Stuck()).run())


def test_tokens_of_a_policy_that_was_never_published_are_refused():
    world = Forger()
    with pytest.raises(PolicyMismatch, match="never published"):
        run_virtually(controller(world, steps=3, batch=2, max_lag=1).run())
    assert world.weights == 0


def test_a_run_that_drops_everything_says_so():
    with pytest.raises(RunFailed, match="10 groups in a row were dropped: 10 with every attempt wrong; use easier tasks"):
        run_virtually(controller(World(drop_share=1.0), steps=3, batch=2, max_lag=1, barren=5).run())


def test_groups_that_are_dropped_now_and_then_do_not_add_up_to_a_barren_run():
    world = World(drop_share=0.5)
    run = controller(world, steps=20, batch=2, max_lag=1, barren=6)
    assert run_virtually(run.run()) == 20
    dropped = sum(fates == ["zero-variance"] for fates in world.fates.values())
    assert dropped > 2 * 6, "more in all than may be dropped in a row"


def test_a_verifier_that_always_fails_stops_the_run_with_its_reason():
    with pytest.raises(RunFailed, match="division by zero"):
        run_virtually(controller(Unscorable(), steps=3, batch=2, max_lag=1).run())


def test_a_run_that_goes_on_uses_what_had_finished_and_samples_the_rest_again():
    world = World()
    old = Version(4, fingerprint="f4")
    row = Trajectory(np.zeros(2, np.int32), np.ones(2, bool), np.zeros(2, np.float32), np.full(2, 4, np.int32), Finish.STOP)
    row.outcome, row.sources = Score(1.0), (old,)
    task = Task("t", "?")
    run = controller(world, steps=8, batch=2, max_lag=1, first=5, incarnation=1)
    run.buffer = Buffer(batch=2, max_lag=1, total=6, next_id=12, live=[10, 11])
    run.versions[old.key] = old
    run.restored = [Group(10, task, [row]), (11, task)]
    world.weights, world.fates = 5, {10: [], 11: []}
    assert run_virtually(run.run()) == 8
    assert sorted(world.fates) == list(range(10, 16))
    assert all(fate == ["trained"] for fate in world.fates.values())
    assert world.lags[0] == 1 and max(world.lags) <= 1


@pytest.mark.parametrize("max_lag", [0, 2])
def test_deterministic_what_samples_a_group_does_not_depend_on_time(max_lag):
    """Runs that differ in every duration sample each group at the same versions and train the same steps."""

    def versions(seed: int, deterministic: bool) -> tuple[dict[int, set[int]], list[list[int]]]:
        times = random.Random(seed)
        world = World(sigma=1.5, train_s=times.uniform(1, 40), sync_s=times.uniform(0, 5))
        sampled: dict[int, set[int]] = {}
        steps: list[list[int]] = []

        class Roller:
            async def rollout(self, group_id: int, task: Task) -> Group:
                world.rng = random.Random(seed * 1000 + group_id)  # durations differ from run to run,
                group = await world.rollout(group_id, task)
                group.trajectories[0].outcome = Score(float(group_id % 3 > 0))  # outcomes do not: a third is dropped
                sampled[group_id] = set(group.trajectories[0].versions.tolist())
                return group

        begin = world.begin_step
        world.begin_step = lambda step, incarnation, ids, again: (steps.append(list(ids)), begin(step, incarnation, ids))
        run_virtually(
            controller(world, steps=8, batch=4, max_lag=max_lag, roller=Roller(), deterministic=deterministic).run()
        )
        assert max(world.lags) <= max_lag
        return {g: v for g, v in sampled.items() if any(g in ids for ids in steps)}, steps

    expected = versions(1, True)
    assert all(len(v) == 1 for v in expected[0].values())
    assert all(versions(seed, True) == expected for seed in range(2, 12))
    assert max_lag == 0 or any(versions(seed, False) != expected for seed in range(2, 12)), "the test cannot fail"
