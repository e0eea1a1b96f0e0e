"""Pools of several policies: requests and versions go to their policy's, and groups begin again with less context."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from tidemill.controller.engine_pool import EnginePool, Member
from tidemill.controller.policy_pools import PolicyPools, PolicyRoutes
from tidemill.core.errors import PeerLost
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate


class Engine:
    """Answers with its own name, and notes what it is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[str]()
        self.updates, self.aborted = list[Version](), list[str]()
        self.dies = False

    async def generate(self, request: GenerateRequest) -> str:
        self._ask(request.policy)
        return self.name

    async def score(self, tokens: Any, policy: str, temperature: float, top_k: int) -> str:
        self._ask(policy)
        return self.name

    async def abort(self, key: str) -> None:
        self.aborted.append(key)

    async def update(self, new: WeightUpdate) -> Version:
        self.updates.append(new.version)
        return new.version

    def _ask(self, policy: str) -> None:
        if self.dies:
            raise PeerLost(f"{self.name} died")
        self.asked.append(policy)


def member(name: str, context: int = 64) -> Member:
    return Member(name, cast(Any, Engine(name)), Capabilities(context))


def engine_of(member: Member) -> Engine:
    return cast(Any, member.engine)


def asks(policy: str) -> GenerateRequest:
    return GenerateRequest(np.zeros(1, np.int32), SamplingParams(max_tokens=1), policy, "key")


def update(policy: str, step: int = 0) -> WeightUpdate:
    return WeightUpdate(Version(step, policy=policy, fingerprint=f"{policy}{step}"), (WeightPart("memory", "here", 1),))


async def test_requests_and_versions_go_to_the_pool_of_their_policy() -> None:
    a, b, judge = member("engine-a-0"), member("engine-b-0", 32), member("engine-judge-0")
    pools = PolicyPools({"a": EnginePool([a]), "b": EnginePool([b]), "judge": EnginePool([judge])})
    assert pools.context == 32

    async def work(routes: PolicyRoutes) -> list[Any]:
        assert routes.context == 32
        scored = await routes.score(np.zeros(1, np.int32), "a", 1.0, 0)
        return [await routes.generate(asks("b")), await routes.generate(asks("judge")), scored]

    assert await pools.run(work) == ["engine-b-0", "engine-judge-0", "engine-a-0"]
    for policy, own in (("a", a), ("b", b)):
        assert await pools.publish(update(policy)) == update(policy).version
        assert engine_of(own).updates == [update(policy).version]
    assert not engine_of(judge).updates and {version.policy for version in pools.in_force} == {"a", "b"}
    assert not any(each.groups for each in (a, b, judge)), "a group that has ended still counts"
    assert {version.policy for version in pools.withdraw()} == {"a", "b"}


async def test_policies_may_share_a_pool_and_a_group_stays_with_one_member() -> None:
    shared, alone = [member("engine-0"), member("engine-1")], [member("engine-c-0"), member("engine-c-1")]
    adapters = EnginePool(shared)
    pools = PolicyPools({"a": adapters, "b": adapters, "c": EnginePool(alone)})
    everyone = asyncio.Event()

    async def group(routes: PolicyRoutes) -> list[Any]:
        first = [await routes.generate(asks(policy)) for policy in "abc"]
        if sum(each.groups for each in shared) == 2:
            everyone.set()
        await everyone.wait()
        return [*first, *[await routes.generate(asks(policy)) for policy in "abc"]]

    found = await asyncio.wait_for(asyncio.gather(pools.run(group), pools.run(group)), 10)
    for name in found:
        assert name[:3] == name[3:] and name[0] == name[1], "a group's requests of one pool went to two members"
    assert {name[0] for name in found} == {"engine-0", "engine-1"} and {name[2] for name in found} == {
        "engine-c-0",
        "engine-c-1",
    }
    assert len(pools.in_force) == 0
    await pools.publish(update("a"))
    await pools.publish(update("b"))
    assert [version.policy for version in pools.in_force] == ["a", "b"], "a shared pool is counted twice"


async def test_an_abort_reaches_every_pool_that_was_asked() -> None:
    a, b = member("engine-a-0"), member("engine-b-0")
    pools = PolicyPools({"a": EnginePool([a]), "b": EnginePool([b])})

    async def work(routes: PolicyRoutes) -> None:
        await routes.generate(asks("a"))
        await routes.abort("key")

    await pools.run(work)
    assert engine_of(a).aborted == ["key"] and not engine_of(b).aborted


async def test_a_group_begins_again_when_the_members_left_have_less_context() -> None:
    wide, narrow, other = member("engine-a-0", 64), member("engine-a-1", 16), member("engine-b-0", 64)
    pool = EnginePool([wide])
    pool.supervised(lambda name, why: None)
    pools, begun = PolicyPools({"a": pool, "b": EnginePool([other])}), list[int]()

    async def work(routes: PolicyRoutes) -> Any:
        begun.append(routes.context)
        await routes.generate(asks("b"))
        if len(begun) == 1:
            engine_of(wide).dies = True
            await pool.join(narrow)
        return await routes.generate(asks("a"))

    assert await asyncio.wait_for(pools.run(work), 10) == "engine-a-1"
    assert begun == [64, 16] and not any(each.groups for each in (wide, narrow, other))


async def test_a_policy_without_engines_is_refused_by_name() -> None:
    pools = PolicyPools({"a": EnginePool([member("engine-a-0")]), "b": EnginePool([member("engine-b-0")])})
    with pytest.raises(ValueError, match=r"policy 'c': no engine serves it; expected one of 'a', 'b'"):
        await pools.run(lambda routes: routes.generate(asks("c")))
    with pytest.raises(ValueError, match="policy 'c'"):
        await pools.publish(update("c"))
