"""A real trainer sends changes to a real engine in bfloat16, and messages are lost, repeated and reordered."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BASE, VOCAB, decoder, engine

from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.controller.weight_delivery import Delivery
from tidemill.core.errors import BaseMissing, PolicyMismatch, WeightsMoved
from tidemill.core.types import LossSpec, Sample, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.decoder import Decoder
from tidemill.models.hf_weights import hf_views, serving_slices
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

TRANSPORTS = ("shared_memory", "checkpoint", "collective", "direct")
FAULTS = ("none", "none", "dropped", "repeated", "reordered", "another engine")
LOSSES = {"policy": LossSpec("cross_entropy")}


def rows(step: int) -> list[Sample]:
    rng, found = np.random.default_rng(step), list[Sample]()
    for length in (9, 14):
        tokens, nothing = rng.integers(0, VOCAB, length).astype(np.int32), np.zeros(length, np.float32)
        weights = (np.arange(length) > 0).astype(np.float32)
        found.append(Sample(tokens, nothing > 0, nothing, tokens * 0 - 1, nothing, weights))
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(each.contiguous().view(-1).view(torch.uint8).numpy()) for name, each in tensors.items()}


class Run:
    """A trainer that steps, an engine, and the messages between them."""

    def __init__(self, transport: str, folder: Path, full_every: int = 6, lr: float = 1e-3) -> None:
        self.transport = transport
        sender = make_sender(SyncSettings(transport=transport, full_every=full_every), folder)  # type: ignore[arg-type]
        settings = TrainerSettings(device="cpu", serving_dtype="bfloat16", lr=lr)
        self.trainer = NativeTrainer(decoder(BASE, seed=1), settings, steps=999, sender=sender)
        self.engine, self.step = self.started(), 0
        self.kinds, self.noticed = Counter[str](), 0

    def started(self) -> NativeEngine:
        return engine(BASE, receiver=make_receiver(self.transport), dtype="bfloat16")  # type: ignore[arg-type]

    async def published(self) -> WeightUpdate:
        """Train a step and publish it."""
        await self.trainer.forward_backward(rows(self.step), LOSSES)
        await self.trainer.apply(0.05)
        self.step += 1
        update = await self.trainer.publish(Version(self.step))
        self.kinds[update.kind] += 1
        return update

    async def bring(self, update: WeightUpdate) -> bool:
        """Deliver a message. Returns False if the engine lacked the base, and got all weights."""

        def lose(member: Member, error: Exception) -> None:
            raise error

        member = Member("engine-0", self.engine, await self.engine.capabilities())
        brought = await Delivery(20.0).bring(update, [member], self.trainer, lose)
        self.noticed += brought is not update
        return brought is update

    async def same(self) -> None:
        """The engine serves the trainer's own weights, to the bit."""
        served = self.engine._updates.weights
        assert served.version.step == self.step
        own = {piece.name: piece.tensor for piece in serving_slices(self.trainer.decoder, torch.bfloat16)}
        assert isinstance(served.decoder, Decoder) and bits(dict(hf_views(served.decoder))) == bits(own)

    async def go(self, fault: str) -> None:
        """A step with this fault of its messages."""
        first = await self.published()
        if fault == "dropped":
            assert not await self.bring(await self.published()) or self.kinds["full"] > 1
        elif fault == "repeated":
            await self.bring(first)
            assert await self.bring(first) == (first.kind == "full")
        elif fault == "reordered" and not first.live:
            second = await self.published()
            await self.bring(second)
            with pytest.raises((PolicyMismatch, WeightsMoved, ValueError)):
                await self.bring(first)
        elif fault == "another engine":
            await self.engine.close()
            self.engine = self.started()
            assert await self.bring(first) == (first.kind == "full")
        else:
            await self.bring(first)
        await self.same()

    async def close(self) -> None:
        await self.engine.close()
        await self.trainer.close()


@pytest.fixture(params=TRANSPORTS)
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(request.param, tmp_path)
    yield made
    await made.close()


async def test_changes_come_to_the_same_bits_with_faults_of_messages(one: Run) -> None:
    chosen = random.Random(one.transport)
    for _ in range(2):
        for fault in chosen.sample(FAULTS, len(FAULTS)):
            await one.go(fault)
    assert one.noticed >= 4 and one.kinds["delta"] > 3 * one.kinds["full"], "most are changes, and faults were noticed"


@pytest.mark.slow
async def test_two_hundred_steps_come_to_the_same_bits(one: Run) -> None:
    chosen = random.Random(one.transport)
    while one.step < 200:
        await one.go(chosen.choice(FAULTS))
    assert one.noticed >= 60 and one.kinds["delta"] >= 150


async def test_a_change_of_another_base_is_refused_before_anything_is_received(one: Run, monkeypatch) -> None:
    await one.bring(await one.published())
    await one.published()  # it is lost
    update, served = await one.published(), one.engine._updates.weights
    with pytest.raises(BaseMissing, match="but engine engine-0 serves policy@v1"):
        await one.engine.update(update)
    assert one.engine._updates.weights is served
    assert not await one.bring(update)
    await one.same()


async def test_members_that_join_get_all_weights_in_the_same_publication(one: Run) -> None:
    """One that joins while the trainer is a step further, too: what it is sent is the trainer's copy."""
    pool = EnginePool([Member("engine-0", one.engine, await one.engine.capabilities())])
    publisher = PoolPublisher(one.trainer, pool)
    for step in range(1, 4):
        await publisher.publish(Version(step))
        await one.trainer.forward_backward(rows(step), LOSSES)
        await one.trainer.apply(0.05)
    late = one.started()
    try:
        await asyncio.wait_for(pool.join(Member("late", late, await late.capabilities())), 30)
        versions = [each._updates.weights.version for each in (one.engine, late)]
        assert versions[0] == versions[1] and versions[0].step == 3
        served = await publisher.publish(Version(4))
        assert all(each._updates.weights.version == served for each in (one.engine, late))
    finally:
        await late.close()


@pytest.mark.parametrize("one", ["collective", "direct"], indirect=True)
async def test_a_copy_that_is_being_sent_does_not_change(one: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next publication waits for the end of a transfer to an engine that joins."""
    reached, opened = threading.Event(), threading.Event()
    await one.bring(await one.published())
    update = await one.published()
    kind = type(one.trainer._publication._sender._sender)  # type: ignore[union-attr]
    send_all = kind._send_all

    def held(end: Any, link: Any, manifest: Any, tensors: Iterator[torch.Tensor], watch: Any) -> None:
        def stopping() -> Iterator[torch.Tensor]:
            for count, tensor in enumerate(tensors):
                if count == 3:
                    reached.set()
                    assert opened.wait(60)
                yield tensor

        send_all(end, link, manifest, stopping(), watch)

    monkeypatch.setattr(kind, "_send_all", held)
    await one.engine.close()
    one.engine = one.started()
    bringing = asyncio.ensure_future(one.bring(update))
    await asyncio.to_thread(reached.wait, 60)
    with torch.no_grad():
        for parameter in one.trainer.decoder.parameters():
            parameter += 1.0
    publishing = asyncio.ensure_future(one.trainer.publish(Version(3)))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not publishing.done()
    opened.set()
    assert not await bringing
    one.step = 3
    assert await one.bring(await publishing)
    await one.same()


async def test_an_engine_that_gave_its_weights_back_lacks_the_base(one: Run) -> None:
    await one.bring(await one.published())
    await one.engine.sleep(weights=True)
    assert not await one.bring(await one.published())
    await one.engine.wake()
    await one.same()
