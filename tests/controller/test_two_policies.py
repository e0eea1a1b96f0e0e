"""Two policies in one run, under virtual time: they share its steps, slots and lag bound, and each is published."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from test_controller import World, controller
from virtual_time import run_virtually

from tidemill.controller.controller import Controller
from tidemill.core.attempt_checks import check_row
from tidemill.core.errors import PolicyMismatch
from tidemill.core.types import Finish, Group, PreparedStep, Score, Task, Trajectory, Update, Version


class TwoPolicies(World):
    """Two policies, whose engines commit one after the other; an attempt of each in every group."""

    def __init__(self, rng: random.Random, **settings) -> None:
        super().__init__(rng, **settings)
        self.served: dict[str, Version] = {}
        self.published: list[tuple[str, int]] = []
        self.agreed: list[tuple[str, int]] = []
        self.lags_of: dict[str, list[int]] = {"a": [], "b": []}
        self.seen: list[int] = []  # steps whose versions were evaluated

    async def rollout(self, group_id: int, task: Task) -> Group:
        rows = []
        for sample, policy in enumerate(self.rng.sample(("a", "b"), 2)):
            rows.append(await self._attempt(policy, sample))
        return Group(group_id, task, rows)

    async def _attempt(self, policy: str, sample: int) -> Trajectory:
        stamps, n = list[Version](), 4
        total = self.gen_s * np.exp(self.rng.gauss(0, self.sigma))
        for _ in range(n):
            await asyncio.sleep(total / n)
            stamps.append(self.served[policy])
        steps, zeros = np.array([v.step for v in stamps], np.int32), np.zeros(n, np.float32)
        sources, reward = tuple(sorted(set(stamps))), Score(float(self.rng.random() >= self.drop_share))
        ones = np.ones(n, bool)
        made = Trajectory(zeros.astype(np.int32), ones, zeros, steps, Finish.STOP, reward, sources, sample)
        check_row(made)
        return made

    async def publish_to_engines(self, version: Version) -> Version:
        before = self.weights
        await asyncio.sleep(self.rng.uniform(0, 2 * self.sync_s))
        self.torn += before != self.weights
        served = Version(version.step, version.incarnation, version.policy, f"{version.policy}{version.step}")
        self.served[version.policy] = served
        return served

    def publish(self, version: Version) -> None:
        self.published.append((version.policy, version.step))

    def prepare(self, groups, step, rows, logprobs):
        for row in (row for group in groups for row in group.trajectories):
            self.lags_of[row.policy].append(self.weights - int(row.versions.min()))
        return PreparedStep([], {}, [Update([], 1.0)], {})

    async def agree(self, version: Version, groups, samples, logprobs) -> None:
        assert self.served[version.policy] == version, "weights changed before the check of what they sampled"
        self.agreed.append((version.policy, version.step))

    async def evaluate(self, served: Sequence[Version]) -> dict[str, float]:
        for _ in range(3):
            assert self.served == {version.policy: version for version in served}, "an evaluated version was replaced"
            await asyncio.sleep(5)
        self.seen.append(served[0].step)
        return {}


def two_policies(world: World, **settings) -> Controller:
    run = controller(world, **settings)
    run.policies = ("a", "b")
    assert isinstance(world, TwoPolicies)
    run.hooks.evaluate = world.evaluate
    return run


@pytest.mark.parametrize("seed", range(30))
def test_two_policies_share_steps_slots_and_the_bound(seed):
    rng = random.Random(seed)
    batch, lag, steps = rng.randint(1, 5), rng.randint(0, 3), rng.randint(2, 12)
    world = TwoPolicies(
        rng,
        gen_s=rng.choice([1, 20, 100]),
        sigma=rng.choice([0.1, 1.5]),
        train_s=rng.choice([0, 10, 60]),
        sync_s=rng.choice([0, 1, 15]),
        drop_share=rng.choice([0, 0.3]),
    )
    every = rng.choice([0, 2, 3])
    run = two_policies(
        world, steps=steps, batch=batch, max_lag=lag, window=rng.randint(1, lag * batch + 1), eval_every=every
    )
    run.hooks.agree = world.agree
    assert run_virtually(run.run()) == steps
    for lags in world.lags_of.values():
        assert len(lags) == steps * batch and max(lags) <= lag and min(lags) >= 0
    assert world.seen == sorted({*(range(0, steps, every) if every else ()), steps})
    assert world.torn == 0
    assert all(len(fate) == 1 for fate in world.fates.values())
    assert sum(fate == ["trained"] for fate in world.fates.values()) == steps * batch
    assert world.published == [(policy, step) for step in range(steps + 1) for policy in "ab"]
    assert world.agreed == world.published[: 2 * steps]
    assert run.versions == {v.key: v for s in range(steps + 1) for v in (Version(s, 0, p, f"{p}{s}") for p in "ab")}


def test_with_two_policies_the_bound_is_tight():
    world = TwoPolicies(random.Random(0), gen_s=100, sigma=1.5, train_s=1, sync_s=0)
    run_virtually(two_policies(world, steps=40, batch=4, max_lag=3).run())
    assert [max(lags) for lags in world.lags_of.values()] == [3, 3]


class Relabelling:
    """A roller that says of what one policy sampled that another version did."""

    def __init__(self, world: TwoPolicies, policy: str, version: Version, first: int = 0) -> None:
        self.world, self.policy, self.version, self.first = world, policy, version, first

    async def rollout(self, group_id: int, task: Task) -> Group:
        group = await self.world.rollout(group_id, task)
        for row in group.trajectories:
            if row.policy == self.policy and group_id >= self.first:
                row.sources, row.versions = (self.version,), np.full_like(row.versions, self.version.step)
        return group


@pytest.mark.parametrize("stranger", [Version(0, 0, "c", "a0"), Version(0, 0, "b", "a0"), Version(0, 1, "a", "a0")])
def test_a_version_counts_only_for_its_own_policy_and_incarnation(stranger):
    world = TwoPolicies(random.Random(0))
    run = two_policies(world, steps=3, batch=2, max_lag=1)
    run.roller = Relabelling(world, "a", stranger)
    with pytest.raises(PolicyMismatch, match="never published"):
        run_virtually(run.run())
    assert world.weights == 0


@pytest.mark.parametrize("policy", ["a", "b"])
def test_a_token_of_either_policy_that_is_too_old_ends_the_run(policy):
    world = TwoPolicies(random.Random(0))
    run = two_policies(world, steps=9, batch=2, max_lag=1)
    run.roller = Relabelling(world, policy, Version(0, 0, policy, f"{policy}0"), first=8)
    with pytest.raises(AssertionError, match="bound broken"):
        run_virtually(run.run())
    assert world.weights == 4
