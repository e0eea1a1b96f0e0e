"""Updates of a real vLLM server: each mode, weights that are refused, an audit, two ranks, and its death in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from contract_base import FREE, LONG, PROMPT, TOLERANCE, Reference, in_parts, new_version, until
from damaged_weights import DAMAGE
from vllm_server import HEAD_DIM, engine_at, started

from tidemill.core.errors import BaseMissing, EngineFailed, PolicyMismatch
from tidemill.core.types import GenerateRequest, Version
from tidemill.core.weight_update import WeightUpdate
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.remote.http_client import ServerClient
from tidemill.engine.vllm.build_vllm_engine import build
from tidemill.engine.vllm.vllm_engine import VllmEngine
from tidemill.engine.vllm.vllm_settings import VllmSettings
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import load_folder, serving_slices
from tidemill.runtime.cpu_sharing import Cores
from tidemill.weight_sync.shared_memory_transport import SharedMemorySender
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

pytestmark = pytest.mark.vllm
TRIES = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return [Reference.make(tmp_path_factory.mktemp(f"model-{seed}"), seed, HEAD_DIM) for seed in (0, 1)]


@pytest.fixture
async def engine(server: str, models: list[Reference]) -> AsyncIterator[VllmEngine]:
    made = engine_at(server, models[0].folder)
    yield made
    await made.close()


@pytest.fixture
async def published(models: list[Reference], tmp_path: Path) -> AsyncIterator[WeightUpdate]:
    async with new_version(models[1].folder, tmp_path, 1) as version:
        yield version


async def updated_in_flight(engine: VllmEngine, update: WeightUpdate) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(tokens, logprobs, steps) of a reply during which the weights were updated."""
    before = (await engine.stats()).generated
    requests = [GenerateRequest(PROMPT, replace(LONG, seed=seed)) for seed in range(16)]  # others, so that it takes longer
    call, *others = [asyncio.ensure_future(engine.generate(request)) for request in requests]

    async def under_way() -> bool:
        return (await engine.stats()).generated > before + 3 * len(requests)

    await until(under_way)
    assert await engine.update(update) == update.version
    done = await call
    await asyncio.gather(*others)
    return done.tokens, done.logprobs, done.versions.tolist()


@pytest.mark.parametrize("mode", ["keep", "recompute", "finish"])
async def test_a_request_in_flight_meets_an_update(
    server: str, models: list[Reference], published: WeightUpdate, mode: str
) -> None:
    for _ in range(TRIES):  # a reply of 90 tokens may end before its update has been received
        engine = engine_at(server, models[0].folder, in_flight=mode)
        try:
            tokens, logprobs, steps = await updated_in_flight(engine, published)
        finally:
            await engine.close()
        if mode == "finish" or 1 in steps:
            break
    old, new = (model.logprobs(PROMPT, tokens) for model in models)
    cut = steps.index(1) if 1 in steps else len(steps)
    assert steps == [0] * cut + [1] * (len(steps) - cut)
    np.testing.assert_allclose(logprobs[:cut], old[:cut], atol=TOLERANCE)
    if mode == "finish":
        assert cut == len(steps)
        return
    assert 0 < cut < len(steps), "the update came while it was sampled"
    gap = np.abs(logprobs[cut:] - new[cut:]).max()
    assert gap < TOLERANCE if mode == "recompute" else gap > TOLERANCE, "with keep, the KV is that of the old weights"


async def refuses(engine: VllmEngine, damaged: WeightUpdate, before: np.ndarray, why: str) -> None:
    with pytest.raises(PolicyMismatch):
        await engine.update(damaged)
    done = await engine.generate(GenerateRequest(PROMPT, FREE))
    assert done.tokens.tolist() == before.tolist() and {v.step for v in done.sources} == {0}, why


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
async def test_damaged_weights_are_refused_and_the_old_ones_are_served(
    server: str, models: list[Reference], tmp_path: Path, transport: str
) -> None:
    """Every kind of damage that a fingerprint is for, in an update that is whole for its transport."""
    spec = EngineSpec(model=models[0].folder, engine=VllmSettings(url=server), transport=transport)
    await engine_at(server, models[0].folder).close()
    engine = build(spec, make_receiver(transport), Cores())
    engine._updates.version = Version(0)
    before = (await engine.generate(GenerateRequest(PROMPT, FREE))).tokens
    pieces = list(serving_slices(load_folder(models[1].folder), torch.float32))
    try:
        async with new_version(models[1].folder, tmp_path / "true", 1) as true:
            for damage in DAMAGE:
                sender = make_sender(SyncSettings.model_validate({"transport": transport}), tmp_path / damage.__name__)
                sent = sender.send(true.version, damage([*pieces]))
                assert not isinstance(sent, str)
                await refuses(engine, sent, before, damage.__name__)
                sender.close()
                await refuses(engine, sent, before, "gone")
    finally:
        await engine.close()


async def test_several_parts_are_verified_together(engine: VllmEngine, models: list[Reference], tmp_path: Path) -> None:
    with in_parts(models[1].folder, tmp_path, step=1, parts=3) as update:
        assert await engine.update(update) == update.version
        await engine.audit()


async def test_changes_are_served_and_a_missed_one_is_noticed(
    engine: VllmEngine, models: list[Reference], tmp_path: Path
) -> None:
    sender: Any = make_sender(SyncSettings(full_every=9), tmp_path)
    pieces = [replace(p, tensor=p.tensor.clone()) for p in serving_slices(load_folder(models[1].folder), torch.float32)]
    updates = list[WeightUpdate]()
    for step in range(1, 5):
        for piece in pieces:
            piece.tensor.view(-1)[step::97] *= 1.01
        updates.append(sender.send(Version(step, fingerprint=fingerprint(pieces)), pieces))
        if step in (1, 2):
            assert await engine.update(updates[-1]) == updates[-1].version
            await engine.audit()
    assert [each.kind for each in updates] == ["full", "delta", "delta", "delta"]
    with pytest.raises(BaseMissing):
        await engine.update(updates[-1])
    whole = sender.send_whole(Version(4))
    assert await engine.update(whole) == updates[-1].version
    await engine.audit()
    sender.close()


async def test_a_sign_of_zero_survives_the_audit(engine: VllmEngine, models: list[Reference], tmp_path: Path) -> None:
    """A product loses the sign of a zero; the fingerprint has it."""
    pieces = [replace(p, tensor=p.tensor.clone()) for p in serving_slices(load_folder(models[1].folder), torch.float32)]
    for piece in pieces:
        piece.tensor.view(-1)[::7] = -0.0
    sender = SharedMemorySender(tmp_path)
    try:
        update = sender.send(Version(1, fingerprint=fingerprint(pieces)), pieces)
        assert await engine.update(update) == update.version
    finally:
        sender.close()


async def test_an_audit_finds_weights_that_changed_where_they_are_served(
    server: str, engine: VllmEngine, published: WeightUpdate
) -> None:
    await engine.update(published)
    await engine.audit()
    client = ServerClient(server, name="the tested server")
    try:
        await client.post("/weight_checker", {"action": "reset"}, 60)  # zeroes the parameters
    finally:
        await client.close()
    with pytest.raises(PolicyMismatch, match="computes with"):
        await engine.audit()
    with pytest.raises(EngineFailed, match="computes with"):
        await engine.generate(GenerateRequest(PROMPT, FREE))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Reference]]]:
    """A server of two ranks, and two models whose head is their embedding."""
    folder = tmp_path_factory.mktemp("two-ranks")
    models = [Reference.make(folder / str(seed), seed, HEAD_DIM, tied=True) for seed in (0, 1)]
    settings = VllmSettings(kv_memory_mb=32, tensor_parallel=2)
    with started(settings, models[0].folder, folder) as url:
        yield url, models


async def test_two_ranks_verify_load_and_are_read_back(two_ranks: tuple[str, list[Reference]], tmp_path: Path) -> None:
    url, models = two_ranks
    engine = engine_at(url, models[0].folder)
    try:
        async with new_version(models[1].folder, tmp_path, 1) as update:
            tokens, logprobs, steps = await updated_in_flight(engine, update)
            cut = steps.index(1)
            np.testing.assert_allclose(logprobs[:cut], models[0].logprobs(PROMPT, tokens)[:cut], atol=TOLERANCE)
            done = await engine.generate(GenerateRequest(PROMPT, FREE))
            np.testing.assert_allclose(done.logprobs, models[1].logprobs(PROMPT, done.tokens), atol=TOLERANCE)
            blocks = await engine._routes.served()
            assert {b.shape for b in blocks} != {b.size for b in blocks}, "no rank holds everything"
            false = replace(update, version=replace(update.version, step=2, fingerprint=update.version.fingerprint[::-1]))
            with pytest.raises(PolicyMismatch):
                await engine.update(false)
            again = await engine.generate(GenerateRequest(PROMPT, FREE))
            assert again.tokens.tolist() == done.tokens.tolist() and again.sources == done.sources
    finally:
        await engine.close()


def tree_of(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def test_a_server_that_dies_in_an_update_or_a_request_ends_its_engine_and_leaves_nothing(
    models: list[Reference], published: WeightUpdate, tmp_path: Path
) -> None:
    for moment in ("update", "request"):
        settings = VllmSettings(kv_memory_mb=32)
        spec = EngineSpec(model=models[0].folder, engine=settings, transport="shared_memory", logs=tmp_path)
        engine = build(spec, make_receiver("shared_memory"), Cores())
        try:
            await engine.capabilities()
            assert engine._process is not None
            tree = tree_of(engine._process._process.pid)
            worker = max(tree, key=lambda each: len(each.parents()))
            await engine.update(replace(published))
            call: asyncio.Future[object]
            if moment == "update":
                load = engine._routes.load

                async def dies(update: str, label: str, worker: psutil.Process = worker, load: object = load) -> None:
                    worker.kill()
                    await load(update, label)  # pyright: ignore

                engine._routes.load = dies
                call = asyncio.ensure_future(engine.update(published))
            else:
                worker.suspend()  # so that it does not finish first
                call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))
                await until(partial(_running, engine))
                worker.kill()
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(call, 120)
            with pytest.raises(EngineFailed):
                await engine.generate(GenerateRequest(PROMPT, FREE))
        finally:
            await engine.close()
        _, alive = psutil.wait_procs(tree, timeout=20)
        assert not alive, moment


async def _running(engine: VllmEngine) -> bool:
    return (await engine.stats()).running > 0
