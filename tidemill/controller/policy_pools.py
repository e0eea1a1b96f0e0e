"""Engine pools by policy: several that stand for one, where policies are served by engines of their own.

    request -> the pool of its policy -> one member        a version -> the pool of its policy

A group's requests to each pool go to one member, as `EnginePool` does it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tidemill.controller.engine_pool import ContextShrank, EnginePool, Route
from tidemill.core.interfaces import Trainer
from tidemill.core.types import Array, Completion, GenerateRequest, Scored, Version
from tidemill.core.weight_update import WeightUpdate

T = TypeVar("T")


class PolicyPools:
    """The engine pools of a run whose policies are not all served by the same engines."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        """pools: by policy; several policies may have one pool."""
        self._of = dict(pools)
        self._pools = list(dict.fromkeys(pools.values()))

    @property
    def in_force(self) -> list[Version]:
        """See `EnginePool.in_force`, of all pools."""
        return [version for pool in self._pools for version in pool.in_force]

    @property
    def context(self) -> int:
        """Tokens that every engine that serves can hold."""
        return min(pool.context for pool in self._pools)

    def of(self, policy: str) -> EnginePool:
        """The pool that serves a policy. Raises ValueError if there is none."""
        if policy not in self._of:
            known = ", ".join(map(repr, self._of))
            raise ValueError(f"policy {policy!r}: no engine serves it; expected one of {known}")
        return self._of[policy]

    async def run(self, work: Callable[[PolicyRoutes], Awaitable[T]]) -> T:
        """Do `work` with an engine whose requests of each policy go to one member of its pool: see `EnginePool.run`."""
        while True:
            routes = PolicyRoutes(self)
            try:
                return await work(routes)
            except ContextShrank:
                continue
            finally:
                routes.leave()

    async def publish(self, published: WeightUpdate, trainer: Trainer | None = None) -> Version:
        """Have the members that serve the version's policy commit it: see `EnginePool.publish`."""
        return await self.of(published.version.policy).publish(published, trainer)

    def withdraw(self) -> list[Version]:
        """See `interfaces.Publisher`."""
        return [version for pool in self._pools for version in pool.withdraw()]

    def restore(self, update: WeightUpdate) -> None:
        """See `EnginePool.restore`."""
        self.of(update.version.policy).restore(update)

    def slept_s(self) -> float:
        """The most seconds that the members of a pool have slept so far."""
        return max(pool.slept_s() for pool in self._pools)


class PolicyRoutes:
    """The engine of one group: its requests of each policy go by a route of that policy's pool."""

    def __init__(self, pools: PolicyPools) -> None:
        self._pools, self.context = pools, pools.context  # tokens that a sequence of the group may have
        self._routes: dict[EnginePool, Route] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._to(request.policy).generate(request)

    async def score(self, tokens: Array, policy: str, temperature: float, top_k: int) -> Scored:
        return await self._to(policy).score(tokens, policy, temperature, top_k)

    async def abort(self, key: str) -> None:
        for route in self._routes.values():
            await route.abort(key)

    def leave(self) -> None:
        for route in self._routes.values():
            route.leave()

    def _to(self, policy: str) -> Route:
        pool = self._pools.of(policy)
        if (route := self._routes.get(pool)) is None:
            route = self._routes[pool] = Route(pool)
            route.context = self.context
        return route


Pool = EnginePool | PolicyPools
AnyRoute = Route | PolicyRoutes
