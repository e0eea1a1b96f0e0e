"""The engine pool, as a contract: random joins, drains, losses, publications and requests, in virtual time.

Every request is answered, or fails by its own cause; no token is of a version that was not in force; what serves has the
newest version; a member that drains gets no new request; a group stays where its prefix is.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import numpy as np
import pytest
from virtual_time import run_virtually

from tidemill.controller.engine_pool import EnginePool, Member, MemberState, Route
from tidemill.core.errors import PeerLost, PolicyMismatch
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import Completion, Finish, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate

POISON = 13  # a prompt that an engine refuses


def published(step: int) -> WeightUpdate:
    return WeightUpdate(Version(step, fingerprint=f"f{step}"), (WeightPart("memory", ""),))


def request(key: str = "", tokens: int = 3, first: int = 0) -> GenerateRequest:
    return GenerateRequest(np.full(4, first, np.int32), SamplingParams(max_tokens=tokens), key=key)


class FakeEngine:
    """Samples a token a second, each stamped with what is served then; commits at some moment of an update."""

    def __init__(self, name: str, rng: random.Random, lies: bool = False) -> None:
        self.name, self.rng, self.lies, self.version = name, rng, lies, Version(-1)
        self.died = asyncio.get_running_loop().create_future()
        self.member: Member | None = None
        self.asked: list[tuple[str, MemberState]] = []  # key, and the member's state when the request came
        self.cancelled = 0

    async def _pass(self, seconds: float) -> None:
        """Let time pass; raise PeerLost if the engine dies meanwhile."""
        await asyncio.wait({self.died}, timeout=seconds)
        if self.died.done():
            raise PeerLost(f"{self.name} died")

    async def update(self, new: WeightUpdate) -> Version:
        await self._pass(self.rng.uniform(0, 3))
        self.version = Version(new.version.step, fingerprint="other") if self.lies else new.version
        await self._pass(self.rng.uniform(0, 3))
        return self.version

    async def generate(self, request: GenerateRequest) -> Completion:
        assert self.member is not None
        self.asked.append((request.key, self.member.state))
        sources = list[Version]()
        try:
            for _ in range(request.params.max_tokens):
                await self._pass(1.0)
                sources.append(self.version)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if request.tokens[0] == POISON:
            raise ValueError(f"{request.key}: this prompt is refused")
        zeros, versions = np.zeros(len(sources), np.float32), np.array([v.step for v in sources], np.int32)
        return Completion(
            versions * 0,
            zeros,
            versions,
            tuple(dict.fromkeys(sources)),
            Finish.STOP,
            prompt_tokens=self.member.can.context,
            engine=self.name,
        )


def member(engine: FakeEngine, context: int = 64) -> Member:
    engine.member = Member(engine.name, cast(Any, engine), Capabilities(context))
    return engine.member


class World:
    """A pool, its life, and what must hold after each event."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engines: list[FakeEngine] = []
        self.pool = EnginePool([self.made("engine-0"), self.made("engine-1")])
        self.pool.supervised(self.lost)
        self.done = -1  # newest step whose publication has ended
        self.begun: list[Version] = []  # versions, in the order of their publications
        self.tasks: set[asyncio.Task[None]] = set()
        self.answers: dict[int, list[Completion] | str] = {}
        self.names = 2

    def made(self, name: str, lies: bool = False, context: int = 64) -> Member:
        self.engines.append(FakeEngine(name, self.rng, lies))
        return member(self.engines[-1], context)

    def start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)

    def lost(self, name: str, why: str) -> None:
        """The supervisor: a new member takes the name of one that was lost."""
        assert "died" in why
        self.start(self.rejoin(name))

    async def rejoin(self, name: str) -> None:
        await asyncio.sleep(self.rng.uniform(0, 5))
        await self.join(name)

    async def join(self, name: str) -> None:
        before, new = self.done, self.made(name, context=self.rng.choice([64, 64, 32]))
        try:
            await self.pool.join(new)
        except PeerLost:  # it died while it joined
            self.start(self.rejoin(name))
            return
        engine = cast(FakeEngine, new.engine)
        assert new.state is MemberState.SERVING and new in self.pool.members
        assert engine.version.step >= max(before, self.done), "it serves less than what was in force"

    async def join_a_liar(self) -> None:
        self.names += 1
        liar = self.made(f"liar-{self.names}", lies=True)
        if self.pool.in_force:
            with pytest.raises((PolicyMismatch, PeerLost)):
                await self.pool.join(liar)
            assert liar.state is MemberState.LOST and liar not in self.pool.members

    async def drain(self) -> None:
        serving = [m for m in self.pool.members if m.state is MemberState.SERVING]
        if len(serving) < 2:
            with pytest.raises(ValueError, match="drain"):
                await self.pool.drain(serving[0].name if serving else "engine-0")
            return
        leaver, hand_over = self.rng.choice(serving), self.rng.random() < 0.5
        asked = len(cast(FakeEngine, leaver.engine).asked)
        begun = asyncio.get_running_loop().time()
        await self.pool.drain(leaver.name, hand_over=hand_over)
        assert leaver.state in (MemberState.GONE, MemberState.LOST) and leaver not in self.pool.members
        assert not leaver.in_flight or leaver.state is MemberState.LOST
        assert len(cast(FakeEngine, leaver.engine).asked) == asked, "it was asked while it drained"
        if hand_over:
            assert asyncio.get_running_loop().time() - begun < 1e-6, "it waited for requests that were handed over"

    def kill(self) -> None:
        living = [m for m in self.pool.members if not cast(FakeEngine, m.engine).died.done()]
        if not living:
            return
        engine = cast(FakeEngine, self.rng.choice(living).engine)
        engine.died.set_result(None)
        if self.rng.random() < 0.5 and engine.member is not None:  # the supervisor notices before a request does
            served = engine.member.state is MemberState.SERVING
            self.pool.drop(engine.name)
            if served:
                self.start(self.rejoin(engine.name))

    async def publish(self) -> None:
        step = len(self.begun)
        self.begun.append(published(step).version)
        assert await self.pool.publish(published(step)) == self.begun[-1]
        self.done = step
        assert any(each.state is MemberState.SERVING for each in self.pool.members), "it ended, and nobody has committed it"
        for each in self.pool.members:
            engine = cast(FakeEngine, each.engine)
            if each.state is MemberState.SERVING and not engine.died.done():
                assert engine.version == self.begun[-1], (
                    f"{each.name} serves {engine.version} after the publication of {step}"
                )

    async def group(self, number: int) -> None:
        """Conversations of several turns that share a route."""
        admitted, poisoned = self.done, self.rng.random() < 0.05
        turns, lengths = self.rng.randrange(1, 4), [self.rng.randrange(1, 6) for _ in range(9)]

        async def work(route: Route) -> list[Completion]:
            async def talk(sample: int) -> list[Completion]:
                first = POISON if poisoned and sample == 0 else 0
                return [
                    await route.generate(request(f"g{number}/{sample}", lengths[3 * sample + turn], first))
                    for turn in range(turns)
                ]

            talks = await asyncio.gather(*(talk(sample) for sample in range(3)), return_exceptions=True)
            for found in talks:
                if isinstance(found, BaseException):
                    raise found
            replies = [reply for found in talks for reply in cast(list[Completion], found)]
            assert all(reply.prompt_tokens >= route.context for reply in replies), "of an engine that has not the context"
            return replies

        try:
            answer: list[Completion] | str = await self.pool.run(work)
        except ValueError as error:
            answer = str(error)
        assert number not in self.answers, "answered twice"
        self.answers[number] = answer
        assert isinstance(answer, str) == poisoned and (not poisoned or f"g{number}/0: this prompt is refused" == answer)
        for reply in answer if isinstance(answer, list) else ():
            assert set(reply.sources) <= set(self.begun), "a token of a version that was never published"
            assert reply.versions.min() >= admitted, "a token older than what was in force when its group was admitted"

    async def live(self, events: int) -> int:
        """So many random events. Returns the number of groups that were asked for."""
        await self.publish()
        publishing, asked = asyncio.ensure_future(asyncio.sleep(0)), 0
        for _ in range(events):
            await asyncio.sleep(self.rng.expovariate(1.0))
            match self.rng.choices(["group", "publish", "join", "drain", "kill", "liar"], [8, 3, 2, 2, 2, 1])[0]:
                case "group":
                    self.start(self.group(asked))
                    asked += 1
                case "publish" if publishing.done():
                    publishing = asyncio.ensure_future(self.publish())
                    self.tasks.add(cast(Any, publishing))
                case "join":
                    self.names += 1
                    self.start(self.join(f"engine-{self.names}"))
                case "drain":
                    self.start(self.drain())
                case "kill":
                    self.kill()
                case "liar":
                    self.start(self.join_a_liar())
        while self.tasks:
            done, self.tasks = self.tasks, set()
            for task in done:
                await task
        return asked

    def check_places(self) -> None:
        for engine in self.engines:
            assert all(state is MemberState.SERVING for _, state in engine.asked), (
                f"{engine.name} was asked when it did not serve"
            )
            assert not engine.lies or not engine.asked
        for each in self.pool.members:
            assert not each.in_flight and not each.groups


@pytest.mark.parametrize("seed", range(40))
def test_whoever_comes_and_goes_every_request_is_answered_by_a_version_in_force(seed: int) -> None:
    async def main() -> None:
        world = World(seed)
        asked = await world.live(events=60)
        assert sorted(world.answers) == list(range(asked)) and asked > 10
        world.check_places()

    run_virtually(main())


# --- one thing at a time -------------------------------------------------------------------------------------------------


def pool_of(*engines: FakeEngine) -> EnginePool:
    return EnginePool([member(engine) for engine in engines])


def fakes(*names: str) -> list[FakeEngine]:
    return [FakeEngine(name, random.Random(0)) for name in names]


def test_a_group_stays_on_one_engine_and_moves_whole_when_that_drains() -> None:
    async def main() -> None:
        first, second, third = fakes("a", "b", "c")
        pool, left = pool_of(first, second), asyncio.Event()

        async def work(route: Route) -> list[str]:
            async def talk(sample: int) -> list[str]:
                said = [(await route.generate(request(f"k{sample}"))).engine for _ in range(3)]
                await left.wait()
                return [*said, *[(await route.generate(request(f"k{sample}"))).engine for _ in range(2)]]

            return [name for said in await asyncio.gather(*map(talk, range(3))) for name in said]

        working = [asyncio.ensure_future(pool.run(work)) for _ in range(3)]
        await asyncio.sleep(4)
        await pool.join(member(third))  # those that have a place keep it
        await asyncio.sleep(6)
        await pool.drain("a")
        left.set()
        told = [await each for each in working]
        assert told[1] == ["b"] * 15, "nobody made it move"
        assert told[0] == ["a", "a", "a", "c", "c"] * 3, "all of it moved to the one with the fewest groups"
        assert told[2] == ["a", "a", "a", "b", "b"] * 3

    run_virtually(main())


def test_requests_in_flight_end_where_they_are_or_are_handed_over() -> None:
    async def main() -> None:
        for hand_over in (False, True):
            first, second = fakes("a", "b")
            pool, loop = pool_of(first, second), asyncio.get_running_loop()
            working = asyncio.ensure_future(pool.run(lambda route: route.generate(request("k", tokens=10))))
            await asyncio.sleep(5)
            begun = loop.time()
            await pool.drain("a", hand_over=hand_over)
            assert loop.time() - begun == pytest.approx(0 if hand_over else 5)
            assert (await working).engine == ("b" if hand_over else "a") and first.cancelled == hand_over

    run_virtually(main())


def test_a_second_call_hurries_a_drain() -> None:
    async def main() -> None:
        first, second = fakes("a", "b")
        pool = pool_of(first, second)
        working = asyncio.ensure_future(pool.run(lambda route: route.generate(request("k", tokens=1000))))
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(pool.drain("a"))
        await asyncio.sleep(1)
        await pool.drain("a", hand_over=True)
        await draining
        assert asyncio.get_running_loop().time() < 3 and (await working).engine == "b"

    run_virtually(main())


def test_a_cancelled_request_is_not_asked_again() -> None:
    """Also when it is cancelled at the moment of a hand-over."""

    async def main() -> None:
        first, second = fakes("a", "b")
        pool = pool_of(first, second)
        working = asyncio.ensure_future(pool.run(lambda route: route.generate(request("k", tokens=10))))
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(pool.drain("a", hand_over=True))
        await asyncio.sleep(0)
        working.cancel()
        await asyncio.wait({working})
        await draining
        assert working.cancelled() and first.cancelled == 1 and not second.asked

    run_virtually(main())


def test_an_engines_own_time_out_is_no_hand_over() -> None:
    async def main() -> None:
        (only,) = fakes("a")

        async def late(request: object) -> Completion:
            raise TimeoutError("engine a did not answer generate() within 3600 s")

        only.generate = late  # type: ignore[method-assign, assignment]
        with pytest.raises(TimeoutError, match="did not answer"):
            await pool_of(only).run(lambda route: route.generate(request()))

    run_virtually(main())


def test_abort_reaches_a_request_that_ends_on_a_member_that_drains() -> None:
    async def main() -> None:
        first, second = fakes("a", "b")
        aborted = list[tuple[str, str]]()
        for engine in (first, second):

            async def abort(key: str, name: str = engine.name) -> None:
                aborted.append((name, key))

            cast(Any, engine).abort = abort
        pool, go = pool_of(first, second), asyncio.Event()

        async def work(route: Route) -> None:
            asking = asyncio.ensure_future(route.generate(request("k", tokens=9)))
            await go.wait()
            await route.generate(request("other"))  # moves the route
            await route.abort("k")
            await asking

        working = asyncio.ensure_future(pool.run(work))
        await asyncio.sleep(1)
        draining = asyncio.ensure_future(pool.drain("a"))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(working, draining)
        assert sorted(aborted) == [("a", "k"), ("b", "k")]

    run_virtually(main())
