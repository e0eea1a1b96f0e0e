"""Live weights on the native engine: they arrive beside its steps, and nothing is served that was not verified."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import BASE, decoder, engine, prompts

from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.core.errors import EngineFailed, PolicyMismatch, TransferFailed
from tidemill.core.types import Completion, GenerateRequest, SamplingParams, Version
from tidemill.core.weight_update import Rendezvous, WeightUpdate
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.live_ends import LiveEnd
from tidemill.weight_sync.process_groups import Link
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

LIVE = ("collective", "direct")
ARCH = replace(BASE, context=400)
PARAMS = SamplingParams(max_tokens=300, ignore_eos=True, seed=5)


def asked(key: str = "one") -> GenerateRequest:
    return GenerateRequest(prompts(1)[0], PARAMS, key=key)


class Run:
    """A trainer, and engines that it sends to, all in this process."""

    def __init__(self, transport: str, folder: Path, engines: int = 1) -> None:
        self.sender = make_sender(SyncSettings(transport=transport), folder)
        self.trainer = NativeTrainer(decoder(ARCH, seed=1), TrainerSettings(device="cpu"), steps=9, sender=self.sender)
        self.engines = [engine(ARCH, receiver=make_receiver(transport)) for _ in range(engines)]  # type: ignore[arg-type]

    async def publisher(self) -> PoolPublisher:
        members = [Member(f"engine-{i}", each, await each.capabilities()) for i, each in enumerate(self.engines)]
        return PoolPublisher(self.trainer, EnginePool(members))

    async def close(self) -> None:
        for each in self.engines:
            await each.close()
        await self.trainer.close()


@pytest.fixture(params=LIVE)
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(request.param, tmp_path)
    yield made
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def steps_of(engine: NativeEngine) -> float:
    return engine._activity.counters["steps"]


class Gate:
    """Holds the sender before its operation `at`, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.opened, self.left = threading.Event(), threading.Event(), at
        send_all = {kind: kind._send_all for kind in LiveEnd.__subclasses__()}

        def held(end: Any, link: Link, manifest: Any, tensors: Any, watch: Any) -> None:
            send_all[type(end)](end, link, manifest, self._held(tensors), watch)

        for kind in send_all:
            monkeypatch.setattr(kind, "_send_all", held)

    def _held(self, tensors: Any) -> Any:
        for count, tensor in enumerate(tensors):
            if count == self.left:
                self.reached.set()
                assert self.opened.wait(60)
            yield tensor


async def alone(weights: int, key: str = "one") -> Completion:
    plain = engine(ARCH, seed=weights)
    try:
        return await plain.generate(asked(key))
    finally:
        await plain.close()


async def test_no_step_is_skipped_while_weights_arrive(one: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer stands still half-way: steps go on, by old weights, and a reply takes as many as without an update."""
    gate, (served,) = Gate(monkeypatch, 5), one.engines
    publisher = await one.publisher()
    reply = asyncio.ensure_future(served.generate(asked()))
    await until(lambda: steps_of(served) > 5)
    publishing = asyncio.ensure_future(publisher.publish(Version(1)))
    await until(gate.reached.is_set)
    before = steps_of(served)
    await until(lambda: steps_of(served) >= before + 60)
    assert not publishing.done() and (await served.stats()).version == Version(0)
    gate.opened.set()
    version = await publishing
    completion = await reply
    first = int(np.flatnonzero(completion.versions)[0])
    assert 65 < first < PARAMS.max_tokens, "committed while it generated"
    old = await alone(0)
    assert np.array_equal(completion.tokens[:first], old.tokens[:first])
    assert steps_of(served) == PARAMS.max_tokens, "every step between stage and commit gave its token"
    assert (await served.stats()).version == version
    assert np.array_equal((await served.generate(asked("later"))).tokens, (await alone(1, "later")).tokens)


async def test_two_engines_and_many_versions_by_one_group(one: Run, tmp_path: Path) -> None:
    one.engines.append(engine(ARCH, receiver=make_receiver(one.sender.transport)))  # type: ignore[union-attr]
    publisher, groups = await one.publisher(), set()
    for step in range(4):
        version = await publisher.publish(Version(step))
        assert [(await each.stats()).version for each in one.engines] == [version] * 2
        groups.add(one.sender._link[0])  # type: ignore[union-attr]
    assert len(groups) == 1


async def test_weights_that_are_not_the_announced_ones_are_not_served(one: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, (served,) = await one.publisher(), one.engines
    first = await publisher.publish(Version(0))
    send = one.sender.send_offered  # type: ignore[union-attr]

    def altered(update: WeightUpdate, stop: threading.Event) -> None:
        manifest, stream = one.sender._offered  # type: ignore[union-attr]
        pieces = [replace(each, tensor=each.tensor.clone()) for each in stream()]
        pieces[3].tensor[0, 0] += 1e-3
        one.sender._offered = manifest, lambda: pieces  # type: ignore[union-attr]
        send(update, stop)

    monkeypatch.setattr(one.sender, "send_offered", altered)
    with pytest.raises(PolicyMismatch, match="first tensor that differs"):
        await publisher.publish(Version(1))
    assert (await served.stats()).version == first
    monkeypatch.undo()
    assert (await publisher.publish(Version(2))).step == 2


async def test_a_cancelled_publication_leaves_both_sides_ready(one: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        gate, (served,) = Gate(patch, 5), one.engines
        publisher = await one.publisher()
        publishing = asyncio.ensure_future(publisher.publish(Version(1)))
        await until(gate.reached.is_set)
        publishing.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
    assert (await served.stats()).version == Version(0)
    assert (await publisher.publish(Version(2))).step == 2
    assert np.array_equal((await served.generate(asked())).tokens, (await alone(1)).tokens)


async def test_closing_an_engine_ends_its_receiving(one: Run) -> None:
    (served,) = one.engines
    update = await one.trainer.publish(Version(1))
    its = replace(update, rendezvous=Rendezvous("g", 1, 1, 60.0))
    updating = asyncio.ensure_future(served.update(its))  # no trainer sends
    await until(lambda: served._updates._receives is not None)
    async with asyncio.timeout(20):
        await served.close()
        with pytest.raises((TransferFailed, EngineFailed)):
            await updating


async def test_the_trainers_step_waits_for_the_end_of_its_sending(one: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, publisher = Gate(monkeypatch, 5), await one.publisher()
    publishing = asyncio.ensure_future(publisher.publish(Version(1)))
    await until(gate.reached.is_set)
    stepping = asyncio.ensure_future(one.trainer.apply(1.0))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not stepping.done() and one.trainer.updates == 0
    gate.opened.set()
    await publishing
    await stepping
    assert one.trainer.updates == 1


async def test_weights_that_have_moved_are_not_sent(one: Run) -> None:
    from tidemill.core.errors import WeightsMoved

    update = await one.trainer.publish(Version(1))
    its = replace(update, rendezvous=Rendezvous("g", 1, 1, 60.0))
    await one.trainer.apply(1.0)
    with pytest.raises(WeightsMoved, match="other weights by now"):
        await one.trainer.send(its)


async def test_sleep_without_weights_needs_a_new_version(one: Run) -> None:
    """Nobody can read live weights again."""
    publisher, (served,) = await one.publisher(), one.engines
    await publisher.publish(Version(1))
    await served.sleep(weights=True)
    with pytest.raises(PolicyMismatch, match="update it first"):
        await served.wake()
    await publisher.publish(Version(2))
    await served.wake()
    assert np.array_equal((await served.generate(asked())).tokens, (await alone(1)).tokens)
