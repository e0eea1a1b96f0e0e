"""A pool whose engines come and go: work is done again elsewhere, versions are never mixed, and patience has an end."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.controller.engine_pool import EnginePool
from tidemill.controller.engine_supervisor import Budget, Supervisor
from tidemill.core.errors import EngineFailed, PeerLost, PolicyMismatch, RunFailed, StartFailed
from tidemill.core.types import Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.runtime.placement import Vitals


def published(step: int) -> WeightUpdate:
    return WeightUpdate(Version(step, fingerprint=f"f{step}"), (WeightPart("memory", ""),))


class FakeEngine:
    """Serves what it is told, until it is lost."""

    def __init__(self, name: str = "", serves: Version | None = None) -> None:
        self.name, self.version, self.lost = name, Version(-1), False
        self.serves = serves  # instead of what was published
        self.updating: asyncio.Event | None = None  # an update takes until it is set

    async def update(self, new: WeightUpdate) -> Version:
        if self.updating is not None:
            await self.updating.wait()
        if self.lost:
            raise PeerLost(f"{self.name} died")
        self.version = self.serves or new.version
        return self.version

    async def work(self) -> tuple[str, int]:
        await asyncio.sleep(0)
        if self.lost:
            raise PeerLost(f"{self.name} died")
        return self.name, self.version.step


class FakeHandle:
    def __init__(self, engine: FakeEngine) -> None:
        self.name, self.proxy = engine.name, engine
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self, why: str) -> None:
        self.proxy.lost = True
        if not self._ended.done():
            self._ended.set_result(why)

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, deadline: float = 10.0) -> str:
        self.kill("was stopped")
        return self._ended.result()

    def vitals(self) -> Vitals:
        return Vitals(self.name, 0, not self._ended.done(), 0.0, 0.0, [])


class Place:
    """Starts engines, and remembers what was told."""

    def __init__(self, count: int = 2, restarts: int = 3, failing: int = 0) -> None:
        self.handles = [FakeHandle(FakeEngine(f"engine-{i}")) for i in range(count)]
        self.pool = EnginePool([h.proxy for h in self.handles])
        self.told: list[str] = []
        self.started, self.failing = 0, failing
        budget = lambda: Budget(restarts, 600.0, 0.0)  # noqa: E731
        self.supervisor = Supervisor(self.pool, self.handles, self.start, budget, lambda kind, _: self.told.append(kind))

    async def start(self, index: int) -> FakeHandle:
        self.started += 1
        if self.started <= self.failing:
            raise StartFailed(f"engine-{index} did not start")
        return FakeHandle(FakeEngine(f"again-{self.started}"))


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_work_of_a_lost_engine_is_done_again_on_another_one():
    place = Place()
    running = asyncio.create_task(place.supervisor.run())
    await place.pool.publish(published(3))
    place.handles[0].proxy.lost = True
    done = await asyncio.gather(*(place.pool.run(lambda engine: engine.work()) for _ in range(6)))
    assert {name for name, _ in done} == {"engine-1"}
    await until(lambda: "engine_restarted" in place.told)
    assert place.told == ["engine_lost", "engine_restarted"] and len(place.pool.engines) == 2
    done = await asyncio.gather(*(place.pool.run(lambda engine: engine.work()) for _ in range(6)))
    assert set(done) == {("engine-1", 3), ("again-1", 3)}, "the one that came back serves the present version"
    running.cancel()


async def test_a_late_word_of_an_engine_that_was_replaced_harms_nobody():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())
    old, late = place.handles[0].proxy, asyncio.Event()
    tried: list[str] = []

    async def work(engine: FakeEngine) -> str:
        tried.append(engine.name)
        if engine is old:
            await late.wait()
            raise PeerLost("engine-0 died")
        return engine.name

    working = asyncio.create_task(place.pool.run(work))
    await until(lambda: tried)
    place.handles[0].kill("died")
    await until(lambda: not place.pool.engines)  # idle or not, it is no more
    await until(lambda: place.pool.engines)
    late.set()
    assert await working == "again-1"
    assert [engine.name for engine in place.pool.engines] == ["again-1"] and place.started == 1
    running.cancel()


async def test_without_a_supervisor_a_loss_is_an_error():
    pool = EnginePool([FakeEngine("a")])
    pool.engines[0].lost = True
    with pytest.raises(PeerLost):
        await pool.run(lambda engine: engine.work())


async def test_an_engine_that_failed_but_lives_is_killed_and_started_again():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())
    failed = False

    async def work(engine: FakeEngine) -> str:
        nonlocal failed
        if not failed:
            failed = True
            raise EngineFailed("out of memory")
        return engine.name

    assert await place.pool.run(work) == "again-1"
    assert "was killed: out of memory" in await place.handles[0].wait()
    running.cancel()


async def test_a_version_is_published_by_those_that_are_up_and_caught_up_with_by_who_comes_back():
    place = Place(count=2)
    running = asyncio.create_task(place.supervisor.run())
    place.handles[0].proxy.lost = True
    assert (await place.pool.publish(published(5))).step == 5
    await until(lambda: len(place.pool.engines) == 2)
    assert [e.version.step for e in place.pool.engines] == [5, 5]
    running.cancel()


async def test_a_publication_that_meets_no_engine_waits_for_one():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())
    place.handles[0].proxy.lost = True
    assert (await place.pool.publish(published(5))).step == 5
    assert place.pool.engines[0].version.step == 5
    running.cancel()


async def test_who_comes_back_never_joins_with_an_older_version():
    """While it commits version 1 the pool is to publish version 2: it joins with 1 before that, or with 2 after it."""
    pool = EnginePool([FakeEngine("a")])
    await pool.publish(published(1))
    late = FakeEngine("b")
    late.updating = asyncio.Event()
    joining = asyncio.create_task(pool.admit(0, late))
    await asyncio.sleep(0)
    publishing = asyncio.create_task(pool.publish(published(2)))
    await asyncio.sleep(0)
    late.updating.set()
    await asyncio.gather(joining, publishing)
    assert [engine.version.step for engine in pool.engines] == [2]


async def test_an_engine_that_serves_something_else_ends_the_run():
    pool = EnginePool([FakeEngine("a"), FakeEngine("b", serves=Version(4, fingerprint="other"))])
    with pytest.raises(PolicyMismatch, match="engine 1 serves"):
        await pool.publish(published(5))


async def test_a_spent_budget_ends_the_run_with_the_first_cause():
    place = Place(count=1, restarts=2, failing=9)
    running = asyncio.create_task(place.supervisor.run())
    place.handles[0].kill("died: killed by SIGSEGV")
    waiting = asyncio.create_task(place.pool.run(lambda engine: engine.work()))
    with pytest.raises(ExceptionGroup) as failed:
        await running
    assert isinstance(failed.value.exceptions[0], RunFailed)
    assert "did not start" in str(failed.value.exceptions[0]) and "SIGSEGV" in str(failed.value.exceptions[0])
    assert place.started == 2
    waiting.cancel()


def test_a_budget_is_of_a_window():
    now = 0.0
    budget = Budget(restarts=3, window_s=100.0, backoff_s=1.0, clock=lambda: now)
    for reason in "abc":
        budget.spend(reason)
    with pytest.raises(RunFailed, match=r"d; it was started again 3 times within 100 s.*the first time: a"):
        budget.spend("d")
    now = 101.0
    assert budget.spend("e") == 0.0, "what was spent before the window counts for nothing"


def test_pauses_grow_for_what_does_not_last_and_for_nothing_else():
    now = 0.0
    budget = Budget(restarts=100, window_s=1000.0, backoff_s=1.0, clock=lambda: now)

    def ends_after(seconds: float) -> float:
        nonlocal now
        now += seconds
        return budget.spend("died")

    assert [ends_after(0.0), *(ends_after(seconds) for seconds in (9.9, 1.9, 2.9))] == [0.0, 1.0, 2.0, 4.0]
    assert ends_after(4.0 + 39.9) == 8.0, "it began after the pause of 4 s, and lived for less than ten of these"
    assert ends_after(8.0 + 80.0) == 0.0, "it had come back: another story"
    assert [ends_after(10.0) for _ in range(20)] == [0.0] * 20, "of a fault now and then nothing is to be feared"
    assert [ends_after(0.0) for _ in range(9)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
