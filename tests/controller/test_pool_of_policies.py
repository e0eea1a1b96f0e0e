"""An engine pool that several policies are published to: members join with all of them, and no order of events hangs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from virtual_time import run_virtually

from tidemill.controller.engine_pool import EnginePool, Member, MemberState, PoolPublisher
from tidemill.core.errors import PeerLost, PolicyMismatch, WeightsMoved
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate

POLICIES = ("a", "b")


class Engine:
    """Commits updates, each of its own policy."""

    def __init__(self, name: str, rng: random.Random | None = None) -> None:
        self.name, self.rng = name, rng or random.Random(0)
        self.serves: dict[str, Version] = {}
        self.told: list[Version] = []
        self.dies = False

    async def update(self, new: WeightUpdate) -> Version:
        self.told.append(new.version)
        await asyncio.sleep(self.rng.uniform(0, 2))
        if self.dies:
            raise PeerLost(f"{self.name} died")
        before = self.serves.get(new.version.policy)
        assert before is None or before.key <= new.version.key, "it steps back"
        self.serves[new.version.policy] = new.version
        return new.version


class Trainer:
    """Publishes weights of each policy; live ones can be sent until the next update."""

    def __init__(self, live: bool) -> None:
        self.live, self.step, self.incarnation = live, 0, 0

    async def publish(self, version: Version) -> WeightUpdate:
        assert version.step == self.step
        named = Version(version.step, version.incarnation, version.policy, f"{version.policy}{version.step}")
        return WeightUpdate(named, (WeightPart("memory", "here", 1, live=self.live),))

    async def send(self, update: WeightUpdate) -> str:
        if update.version.step != self.step:
            raise WeightsMoved("moved")
        return ""


class Scene:
    def __init__(self, *names: str, live: bool = False) -> None:
        self.engines = {name: Engine(name) for name in names}
        self.trainer, self.lost = Trainer(live), list[str]()
        self.pool = EnginePool([self.member(name) for name in names])
        self.pool.supervised(lambda name, why: self.lost.append(name))
        self.publisher = PoolPublisher(cast(Any, self.trainer), self.pool)

    def member(self, name: str) -> Member:
        return Member(name, cast(Any, self.engines[name]), Capabilities(64))

    def joining(self, name: str) -> asyncio.Task[None]:
        self.engines[name] = Engine(name)
        return asyncio.ensure_future(self.pool.join(self.member(name)))

    async def publish(self, step: int, policies: tuple[str, ...] = POLICIES, incarnation: int = 0) -> None:
        self.trainer.step = step
        for policy in policies:
            assert await self.publisher.publish(Version(step, incarnation, policy))

    def served(self, name: str) -> dict[str, int]:
        return {policy: version.step for policy, version in self.engines[name].serves.items()}


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtually(work)


@pytest.mark.parametrize("live", [False, True])
def test_who_joins_gets_the_version_in_force_of_each_policy_and_each_once(live: bool) -> None:
    async def main() -> None:
        scene = Scene("one", live=live)
        await scene.publish(0)
        await scene.publish(1)
        await scene.joining("two")
        assert scene.served("two") == {"a": 1, "b": 1} == scene.served("one")
        assert [str(version) for version in scene.engines["two"].told] == ["a@v1", "b@v1"]
        assert [str(version) for version in scene.pool.in_force] == ["a@v1", "b@v1"]

    run(main())


@pytest.mark.parametrize("live", [False, True])
def test_who_joins_between_two_publications_serves_once_it_has_both(live: bool) -> None:
    async def main() -> None:
        scene = Scene("one", live=live)
        await scene.publish(0)
        await scene.publish(1, ("a",))
        joining = scene.joining("two")
        await asyncio.sleep(20)
        assert joining.done() is not live, "live weights of the other policy have moved"
        if not live:
            assert scene.served("two") == {"a": 1, "b": 0}
        await scene.publish(1, ("b",))
        await joining
        assert scene.served("two") == {"a": 1, "b": 1}
        assert [str(version) for version in scene.engines["two"].told].count("a@v1") == 1, "it was brought twice"

    run(main())


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_engines_are_lost_in_a_publication_and_the_first_one_to_join_ends_it(policy: str, live: bool) -> None:
    async def main() -> None:
        scene = Scene("one", live=live)
        await scene.publish(0)
        if policy == "b":
            await scene.publish(1, ("a",))
        scene.engines["one"].dies = True
        publishing = asyncio.ensure_future(scene.publish(1, POLICIES[POLICIES.index(policy) :]))
        await asyncio.sleep(5)
        assert scene.lost == ["one"] and not publishing.done(), "nobody serves"
        await scene.joining("two")
        await publishing
        assert scene.served("two") == {"a": 1, "b": 1}

    run(main())


def test_engines_never_step_back_for_any_policy() -> None:
    async def main() -> None:
        scene = Scene("one")
        await scene.publish(5, ("a",))
        await scene.publish(4, ("b",))
        for policy in POLICIES:
            with pytest.raises(PolicyMismatch, match=f"{policy}@v3 would follow {policy}@v"):
                await scene.publish(3, (policy,))
        assert scene.served("one") == {"a": 5, "b": 4}

    run(main())


def test_while_the_trainer_is_away_nobody_joins_before_every_policy_is_there_again() -> None:
    async def main() -> None:
        scene = Scene("one")
        await scene.publish(5)
        assert scene.publisher.withdraw() == [Version(5, 0, "a", "a5"), Version(5, 0, "b", "b5")]
        joining = scene.joining("two")
        await scene.publish(5, ("a",), incarnation=1)
        await asyncio.sleep(20)
        assert not joining.done() and scene.engines["two"].told == []
        await scene.publish(5, ("b",), incarnation=1)
        await joining
        assert {str(version) for version in scene.engines["two"].serves.values()} == {"a@v5.1", "b@v5.1"}

    run(main())


@pytest.mark.parametrize("seed", range(30))
def test_whoever_joins_and_is_lost_at_any_moment_serves_what_is_in_force(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        scene, joins = Scene("one", "two", live=rng.random() < 0.5), list[asyncio.Task[None]]()

        async def come_and_go() -> None:
            for number in range(12):
                await asyncio.sleep(rng.expovariate(0.5))
                serving = [each for each in scene.pool.members if each.state is MemberState.SERVING]
                if serving and rng.random() < 0.5:
                    scene.pool.drop(rng.choice(serving).name)
                joins.append(scene.joining(f"engine-{number}"))

        moving = asyncio.ensure_future(come_and_go())
        for step in range(8):
            await scene.publish(step)
            for each in scene.pool.members:
                if each.state is MemberState.SERVING:
                    assert scene.served(each.name) == {"a": step, "b": step}
            await asyncio.sleep(rng.uniform(0, 5))
        await moving
        await scene.publish(8)
        await asyncio.gather(*joins)
        assert all(scene.served(each.name) == {"a": 8, "b": 8} for each in scene.pool.members)

    run(main())
