"""Trainer and engines on one device take turns, and a run that pauses its rollouts never waits for them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.controller.device_turns import DeviceTurns
from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.core.bounded_await import bounded
from tidemill.core.errors import EngineFailed, Overdue
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Finish, Group, Score, Task, TrainResult, Trajectory, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate


@dataclass
class Device(World):
    """One device: its engines sample while they are awake, and its trainer computes only while they sleep."""

    awake: asyncio.Event = field(default_factory=asyncio.Event)
    on_device: bool = True  # the trainer's moments
    turns: int = 0
    probed: list[int] = field(default_factory=list)
    unserved: int = 0  # times that engines woke without the version that was published last
    sampling: set[int] = field(default_factory=set)
    at_update: list[set[int]] = field(default_factory=list)  # groups that were being sampled at each update

    async def rollout(self, group_id: int, task: Task) -> Group:
        self.sampling.add(group_id)
        steps, total = list[Version](), self.gen_s * np.exp(self.rng.gauss(0, self.sigma))
        for _ in range(8):
            await self.awake.wait()
            await asyncio.sleep(total / 8)
            await self.awake.wait()  # a token that was cut off by the trainer's turn is sampled after it
            steps.append(self.serving)
        self.sampling.discard(group_id)
        lags, reward = np.array([v.step for v in steps], np.int32), float(self.rng.random() >= self.drop_share)
        row = Trajectory(np.zeros(8, np.int32), np.ones(8, bool), np.zeros(8, np.float32), lags, Finish.STOP, Score(reward))
        row.sources = tuple(sorted(set(steps)))
        return Group(group_id, task, [row])

    async def forward_backward(self, samples, losses) -> TrainResult:
        assert not self.awake.is_set(), "the trainer computes while the engines have the device"
        assert self.on_device
        return await super().forward_backward(samples, losses)

    async def apply(self, scale: float) -> dict[str, float]:
        assert not self.awake.is_set()
        self.at_update.append(set(self.sampling))
        return await super().apply(scale)

    # the trainer's
    async def sleep(self) -> None:
        assert not self.awake.is_set() or not self.weights, "both have their memory on the device"
        self.on_device = False

    async def wake(self) -> None:
        assert not self.awake.is_set()
        self.on_device = True


class Pool:
    """The engines of a `Device`."""

    def __init__(self, world: Device) -> None:
        self.world = world

    async def sleep(self) -> None:
        self.world.turns += self.world.awake.is_set()
        self.world.awake.clear()

    async def wake(self) -> None:
        self.world.unserved += self.world.serving.step != self.world.weights
        assert not self.world.on_device, "both have their memory on the device"
        self.world.awake.set()


def shared(world: Device, **how) -> Any:
    world.awake.set()
    run = controller(world, **how)
    run.turns = DeviceTurns(world, Pool(world))  # type: ignore[arg-type]
    saving = run.hooks.checkpoint

    async def checkpoint(step, next_id):
        assert world.on_device and not world.awake.is_set(), "the moments that it copies are on the device"
        return await saving(step, next_id)

    async def probe(version, samples, logprobs) -> None:
        assert world.awake.is_set() and world.serving == version, "engines score with the weights that sampled the step"
        world.probed.append(version.step)

    run.hooks.probe, run.hooks.checkpoint = probe, checkpoint
    return run


@pytest.mark.parametrize("seed", range(30))
def test_what_holds_of_a_run_holds_when_both_take_turns(seed):
    rng = random.Random(seed)
    batch, lag, steps = rng.randint(1, 6), rng.randint(0, 4), rng.randint(3, 20)
    world = Device(
        rng,
        gen_s=rng.choice([1, 20, 100]),
        sigma=rng.choice([0.1, 0.8, 1.5]),
        train_s=rng.choice([0, 1, 10, 60]),
        sync_s=rng.choice([0, 1, 15]),
        drop_share=rng.choice([0, 0.3]),
    )
    deterministic = rng.random() < 0.3
    window = 1 if deterministic else rng.randint(1, lag * batch + 1)
    every = {"eval_every": rng.choice([0, 2]), "checkpoint_every": rng.choice([0, 3]), "probe_every": rng.choice([0, 2])}
    run = shared(world, steps=steps, batch=batch, max_lag=lag, window=window, deterministic=deterministic, **every)
    assert run_virtually(run.run()) == steps, "nobody waits for what cannot come"
    assert max(world.lags) <= lag and min(world.lags) >= 0 and world.torn == 0
    assert all(len(fate) == 1 for fate in world.fates.values())
    assert sum(fate == ["trained"] for fate in world.fates.values()) == steps * batch
    assert world.turns == steps + len(world.probed) and world.unserved == 0
    assert world.probed == [s for s in range(steps) if every["probe_every"] and s % every["probe_every"] == 0]
    if deterministic:
        assert not any(world.at_update), "the version that samples a group follows from the group"


def test_groups_of_later_steps_pause_and_go_on():
    world = Device(gen_s=20, sigma=0.8, train_s=30)
    assert run_virtually(shared(world, steps=12, batch=4, max_lag=2).run()) == 12
    assert any(world.at_update), "they need not finish before the trainer's turn"
    assert max(world.lags) > 0


def test_a_stop_in_the_engines_turn_still_saves():
    world = Device(gen_s=20, train_s=5)
    run = shared(world, steps=1000, batch=2, max_lag=1)

    async def main() -> int:
        asyncio.get_running_loop().call_later(300, run.stop)
        return await run.run()

    done = run_virtually(main())
    assert 0 < done < 1000 and world.saved == [done]


# -- the pool ------------------------------------------------------------------------------------------------------------


class Sleeper:
    """An engine that notes what it is told."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[str] = []
        self.fails = fails

    async def _do(self, what: str) -> None:
        self.told.append(what)
        if what == self.fails:
            raise EngineFailed("it is gone")
        await asyncio.sleep(1)

    async def sleep(self, weights: bool = False) -> None:
        await self._do("sleep, weights too" if weights else "sleep")

    async def wake(self) -> None:
        await self._do("wake")

    async def update(self, update: WeightUpdate) -> Version:
        await self._do(f"update {update.version.step}")
        return update.version


def member(name: str, engine: Sleeper) -> Member:
    return Member(name, engine, Capabilities(100, sleep=True))  # type: ignore[arg-type]


def published(step: int) -> WeightUpdate:
    return WeightUpdate(Version(step, fingerprint="f"), (WeightPart("memory", str(step)),))


def test_who_joins_while_the_pool_sleeps_sleeps_too_and_who_fails_is_lost():
    engines, lost = {name: Sleeper() for name in "abc"}, []
    engines["b"].fails = "wake"

    async def main() -> None:
        pool = EnginePool([member(name, engines[name]) for name in "ab"])
        pool.supervised(lambda name, why: lost.append(name))
        await pool.sleep()
        await pool.publish(published(1))
        await pool.wake()
        assert lost == ["b"] and [m.name for m in pool.members] == ["a"]
        await asyncio.sleep(5)
        await asyncio.gather(pool.sleep(), pool.sleep())
        await pool.join(member("c", engines["c"]))
        assert engines["c"].told == ["update 1", "sleep, weights too"]
        assert pool.slept_s() == asyncio.get_running_loop().time() - 5, "all but these"
        await pool.publish(published(2))
        await asyncio.gather(pool.wake(), pool.wake())
        assert engines["a"].told == ["sleep, weights too", "update 1", "wake", "sleep, weights too", "update 2", "wake"]
        assert engines["c"].told[2:] == ["update 2", "wake"]
        slept = pool.slept_s()
        await asyncio.sleep(50)
        assert pool.slept_s() == slept

    run_virtually(main())


def test_an_episode_is_not_charged_for_the_trainers_turns():
    pauses = SimpleNamespace(since=None, before=0.0)

    def paused_s() -> float:
        loop = asyncio.get_running_loop()
        return pauses.before + (loop.time() - pauses.since if pauses.since is not None else 0.0)

    async def episode(*plan: tuple[str, float]) -> str:
        for what, seconds in plan:
            pauses.since = asyncio.get_running_loop().time() if what == "pause" else None
            await asyncio.sleep(seconds)
            pauses.before, pauses.since = paused_s(), None
        return "done"

    async def main(*plan: tuple[str, float]) -> str:
        pauses.before, pauses.since = 1000.0, None
        return await bounded(episode(*plan), 10.0, paused_s)

    assert run_virtually(main(("play", 6), ("pause", 500), ("play", 3.9))) == "done"
    assert run_virtually(main(("pause", 50), ("play", 9))) == "done"
    with pytest.raises(Overdue):
        run_virtually(main(("play", 6), ("pause", 500), ("play", 6)))
    with pytest.raises(Overdue):
        run_virtually(
            main(
                ("play", 11),
            )
        )
