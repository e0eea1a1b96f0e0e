"""A pool whose engines come and go: work is done again elsewhere, versions are never mixed, and patience has an end."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.controller.engine_pool import EnginePool, Member, MemberState, Route
from tidemill.controller.engine_supervisor import Budget, Supervisor
from tidemill.core.errors import ConfigError, EngineFailed, PeerLost, PolicyMismatch, RunFailed, StartFailed
from tidemill.core.interfaces import Capabilities
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

    async def generate(self, request: object = None) -> tuple[str, int]:
        await asyncio.sleep(0)
        if self.lost:
            raise PeerLost(f"{self.name} died")
        return self.name, self.version.step


def member(engine: FakeEngine, context: int = 64) -> Member:
    return Member(engine.name, engine, Capabilities(context))  # type: ignore[arg-type]


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
        self.pool = EnginePool([member(h.proxy) for h in self.handles])
        self.told: list[str] = []
        self.started, self.failing = 0, failing
        budget = lambda: Budget(restarts, 600.0, 0.0)  # noqa: E731
        self.context = 64  # of those that are started later
        tell = lambda kind, _: self.told.append(kind)  # noqa: E731
        self.supervisor = Supervisor(self.pool, "engine", self.handles, self.start, self.member, budget, tell)  # type: ignore

    async def start(self, name: str) -> FakeHandle:
        self.started += 1
        if self.started <= self.failing:
            raise StartFailed(f"{name} did not start")
        handle = FakeHandle(FakeEngine(f"again-{self.started}"))
        handle.name = name
        return handle

    async def member(self, handle: FakeHandle) -> Member:
        return Member(handle.name, handle.proxy, Capabilities(self.context))  # type: ignore[arg-type]


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_work_of_a_lost_engine_is_done_again_on_another_one():
    place = Place()
    running = asyncio.create_task(place.supervisor.run())
    await place.pool.publish(published(3))
    place.handles[0].proxy.lost = True
    done = await asyncio.gather(*(place.pool.run(lambda engine: engine.generate(None)) for _ in range(6)))
    assert {name for name, _ in done} == {"engine-1"}
    await until(lambda: "engine_restarted" in place.told)
    assert place.told == ["engine_lost", "engine_restarted"] and len(place.pool.engines) == 2
    done = await asyncio.gather(*(place.pool.run(lambda engine: engine.generate(None)) for _ in range(6)))
    assert set(done) == {("engine-1", 3), ("again-1", 3)}, "the one that came back serves the present version"
    running.cancel()


async def test_a_late_word_of_an_engine_that_was_replaced_harms_nobody():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())
    old, late = place.handles[0].proxy, asyncio.Event()
    tried: list[str] = []

    async def generate(request: object = None) -> tuple[str, int]:
        tried.append(old.name)
        try:
            await asyncio.Event().wait()
        finally:
            await late.wait()
            raise PeerLost("engine-0 died")

    old.generate = generate
    working = asyncio.create_task(place.pool.run(lambda engine: engine.generate(None)))
    await until(lambda: tried)
    place.handles[0].kill("died")
    await until(lambda: not place.pool.engines)  # idle or not, it is no more
    await until(lambda: place.pool.engines)
    late.set()
    assert (await working)[0] == "again-1"
    assert [engine.name for engine in place.pool.engines] == ["again-1"] and place.started == 1
    running.cancel()


async def test_without_a_supervisor_a_loss_is_an_error():
    pool = EnginePool([member(FakeEngine("a"))])
    pool.engines[0].lost = True
    with pytest.raises(PeerLost):
        await pool.run(lambda engine: engine.generate(None))


async def test_an_engine_that_failed_but_lives_is_killed_and_started_again():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())

    async def fails(request: object = None) -> tuple[str, int]:
        raise EngineFailed("out of memory")

    place.handles[0].proxy.generate = fails
    assert (await place.pool.run(lambda engine: engine.generate(None)))[0] == "again-1"
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
    pool = EnginePool([member(FakeEngine("a"))])
    await pool.publish(published(1))
    late = FakeEngine("b")
    late.updating = asyncio.Event()
    joining = asyncio.create_task(pool.join(member(late)))
    await asyncio.sleep(0)
    publishing = asyncio.create_task(pool.publish(published(2)))
    await asyncio.sleep(0)
    late.updating.set()
    await asyncio.gather(joining, publishing)
    assert [engine.version.step for engine in pool.engines] == [2, 2]


async def test_an_engine_that_serves_something_else_ends_the_run():
    other = Version(5, fingerprint="other")
    pool = EnginePool([member(FakeEngine("a")), member(FakeEngine("b", serves=other))])
    with pytest.raises(PolicyMismatch, match=r"b serves policy@v5 \(other\), published was policy@v5 \(f5\)"):
        await pool.publish(published(5))
    pool = EnginePool([member(FakeEngine("a"))])
    await pool.publish(published(5))
    wrong = member(FakeEngine("c", serves=other))
    with pytest.raises(PolicyMismatch, match="c serves"):
        await pool.join(wrong)
    assert wrong.state is MemberState.LOST and [m.name for m in pool.members] == ["a"]


async def test_engines_never_step_back():
    pool = EnginePool([member(FakeEngine("a"))])
    await pool.publish(published(5))
    with pytest.raises(PolicyMismatch, match=r"policy@v4\.1 would follow policy@v5: engines never step back"):
        await pool.publish(WeightUpdate(Version(4, 1, fingerprint="g"), (WeightPart("memory", ""),)))
    await pool.publish(again := WeightUpdate(Version(5, 1, fingerprint="g"), (WeightPart("memory", ""),)))
    assert pool.engines[0].version == again.version


async def test_while_the_trainer_is_away_nobody_joins_and_those_who_tried_join_with_the_next_version():
    """One finds the weights gone before the loss of the trainer is known."""
    pool, gone = EnginePool([member(FakeEngine("a"))]), asyncio.Event()
    await pool.publish(published(5))

    class Finds(FakeEngine):
        async def update(self, new: WeightUpdate) -> Version:
            if not gone.is_set():
                gone.set()
                raise PolicyMismatch("the weights are gone")
            return await super().update(new)

    first = asyncio.create_task(pool.join(member(Finds("b"))))
    await gone.wait()
    assert pool.withdraw() == [Version(5, fingerprint="f5")]
    second = asyncio.create_task(pool.join(member(FakeEngine("c"))))
    await asyncio.wait({first, second}, timeout=0.01)
    assert [engine.name for engine in pool.engines] == ["a"] and pool.engines[0].version.step == 5
    await pool.publish(published(6))
    await asyncio.gather(first, second)
    assert [engine.version.step for engine in pool.engines] == [6, 6, 6]


async def test_a_spent_budget_ends_the_run_with_the_first_cause():
    place = Place(count=1, restarts=2, failing=9)
    running = asyncio.create_task(place.supervisor.run())
    place.handles[0].kill("died: killed by SIGSEGV")
    waiting = asyncio.create_task(place.pool.run(lambda engine: engine.generate(None)))
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


# --- members that join and leave -----------------------------------------------------------------------------------------


async def test_engines_are_added_and_drained_while_the_run_goes_on():
    place = Place(count=1)
    running = asyncio.create_task(place.supervisor.run())
    await place.pool.publish(published(3))
    with pytest.raises(ValueError, match="no other engine serves"):
        await place.supervisor.remove("engine-0")
    assert await place.supervisor.add() == "engine-1"
    await place.supervisor.remove("engine-0")
    assert await place.handles[0].wait() == "was stopped" and list(place.supervisor.handles) == ["engine-1"]
    assert await place.pool.run(lambda engine: engine.generate(None)) == ("again-1", 3)
    assert await place.supervisor.add() == "engine-0", "the first name that is free"
    place.supervisor.handles["engine-0"].kill("died")
    await until(lambda: "engine_restarted" in place.told)
    assert place.told == ["engine_joined", "engine_drained", "engine_joined", "engine_lost", "engine_restarted"]
    with pytest.raises(ValueError, match=r"'engine-7'.* these serve: engine-1, engine-0"):
        await place.supervisor.remove("engine-7")
    running.cancel()


async def test_an_engine_that_ends_while_it_drains_is_not_started_again():
    place = Place(count=2)
    running = asyncio.create_task(place.supervisor.run())
    asked = asyncio.Event()

    async def hangs(request: object = None) -> tuple[str, int]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    place.handles[0].proxy.generate = hangs
    work = [asyncio.create_task(place.pool.run(lambda engine: engine.generate(None))) for _ in range(2)]
    await asked.wait()
    draining = asyncio.create_task(place.supervisor.remove("engine-0"))
    await until(lambda: place.pool.members[0].state is MemberState.DRAINING)
    place.handles[0].kill("died")
    await draining
    assert {name for name, _ in await asyncio.gather(*work)} == {"engine-1"}
    assert place.told == ["engine_drained"] and place.started == 0 and [m.name for m in place.pool.members] == ["engine-1"]
    running.cancel()


async def test_an_engine_that_cannot_be_taken_is_stopped_and_named():
    place = Place(count=1)

    async def refused(handle: FakeHandle) -> Member:
        raise ConfigError(f"{handle.name} joins with a context of 3 tokens")

    place.supervisor._member = refused  # type: ignore[assignment]
    running = asyncio.create_task(place.supervisor.run())
    with pytest.raises(ConfigError, match=r"^engine-1 joins"):
        await place.supervisor.add()
    assert list(place.supervisor.handles) == ["engine-0"] and len(place.pool.members) == 1
    place.handles[0].kill("died")  # and a restart that is refused ends the run
    with pytest.raises(ExceptionGroup) as failed:
        await running
    assert isinstance(failed.value.exceptions[0], ConfigError)
    assert "could not join" in await place.supervisor.handles["engine-0"].wait()


async def test_a_restart_with_less_context_makes_groups_begin_anew_within_it():
    place = Place(count=1)
    place.context = 32
    running = asyncio.create_task(place.supervisor.run())
    began, go = list[int](), asyncio.Event()

    async def turns(engine: Route) -> tuple[int, tuple[str, int]]:
        began.append(engine.context)
        await engine.generate(None)  # type: ignore[arg-type]
        await go.wait()
        return engine.context, await engine.generate(None)  # type: ignore[arg-type, return-value]

    working = asyncio.create_task(place.pool.run(turns))
    await until(lambda: began)
    place.handles[0].kill("died")
    await until(lambda: place.pool.context == 32)
    go.set()
    assert await working == (32, ("again-1", -1)) and began == [64, 32]
    running.cancel()
