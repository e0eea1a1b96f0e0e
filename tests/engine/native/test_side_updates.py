"""An update changes its own policy and nothing else; what is wrong is refused; what was not committed is found."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_contract import pieces_of
from engine_cases import prompts, reference_logprobs
from side_policies import CONFIGS, AdapterReceiver, asked, expect_sampled_by, side_by_side, trained, until

from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.core.errors import EngineFailed, PolicyMismatch
from tidemill.core.types import Completion, Version
from tidemill.core.weight_update import WeightPart, WeightUpdate
from tidemill.engine.native import weight_updates
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.staged_weights import Weights
from tidemill.engine.native.weight_updates import WeightUpdater
from tidemill.models.adapter_update import base_version
from tidemill.models.decoder import Decoder, decoding_weights
from tidemill.models.fingerprint import fingerprint
from tidemill.models.grouped_adapters import PlacedAdapter, SideAdapters
from tidemill.models.lora import adapters
from tidemill.models.served_linear import Linear
from tidemill.models.weight_slices import Slice
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_receiver, make_sender

MODES = ("keep", "recompute", "finish")
TEXTS = dict(zip(("a", "b", "judge"), prompts(3, 10, 11), strict=True))
NEW = trained("a", 2)


class Scene:
    """An engine that serves a@v1 and b@v1."""

    def __init__(self, **settings: Any) -> None:
        self.receiver = AdapterReceiver()
        self.engine = side_by_side(self.receiver, ("a", "b"), **settings)
        self.models = {policy: trained(policy, 1) for policy in ("a", "b")} | {"judge": trained("judge", 0)}

    async def begin(self) -> Scene:
        for policy in ("a", "b"):
            await self.engine.update(self.receiver.publish(Version(1, policy=policy), self.models[policy]))
        return self

    def begun(self, policy: str, **params: Any) -> asyncio.Future[Completion]:
        given = {"max_tokens": 75, "seed": 5} | params
        return asyncio.ensure_future(self.engine.generate(asked(policy, TEXTS[policy], f"episode {policy}", **given)))

    def next_one(self) -> WeightUpdate:
        return self.receiver.publish(Version(2, policy="a"), NEW)

    def lengths(self) -> dict[int, int]:
        """Known tokens of what runs, by the policy's number."""
        scheduler = self.engine._scheduler
        return {each.policy: int(scheduler.length[slot]) for slot, each in scheduler.running.items()}


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    made = list[Scene]()
    monkeypatch.setattr(weight_updates, "TURN_S", math.inf)  # an update is staged in one turn

    async def make(**settings: Any) -> Scene:
        made.append(Scene(**settings))
        return await made[-1].begin()

    yield make
    for each in made:
        await each.engine.close()


@pytest.mark.parametrize("what", ["reply", "score"])
@pytest.mark.parametrize("mode", MODES)
async def test_what_another_policy_computes_keeps_its_bits_and_its_steps(scene: Any, mode: str, what: str) -> None:
    async def computed(updated: bool) -> tuple[Any, Version, float]:
        here = await scene(in_flight=mode, prefill_chunk=1)
        engine: NativeEngine = here.engine
        before = engine._activity.counters["steps"]
        if what == "reply":
            call: Any = here.begun("b")
        else:
            call = asyncio.ensure_future(engine.score(prompts(1, 90, 91)[0], "b", 1.0, 2))
        await until(lambda: engine._activity.counters["steps"] > before + 20)
        if updated:
            async with asyncio.timeout(60):
                assert (await engine.update(here.next_one())).step == 2
            assert not call.done(), "it is in flight"
        done = await call
        [version] = done.sources if what == "reply" else [done.version]
        return done, version, engine._activity.counters["steps"] - before

    (quiet, *told), (updated, *also) = [await computed(updated) for updated in (False, True)]
    assert told == also and told[0].policy == "b" and told[0].step == 1
    assert np.array_equal(quiet.logprobs, updated.logprobs)
    if what == "reply":
        assert quiet.tokens.tolist() == updated.tokens.tolist()


@pytest.mark.parametrize("mode", MODES)
async def test_in_flight_is_said_of_the_updated_policy(scene: Any, mode: str) -> None:
    here = await scene(in_flight=mode)
    calls = {policy: here.begun(policy) for policy in ("a", "b", "judge")}
    await until(lambda: len(here.lengths()) == 3 and min(here.lengths().values()) > 20)
    update = asyncio.ensure_future(here.engine.update(here.next_one()))
    if mode == "finish":
        await until(lambda: here.engine._updates._draining is not None)
        late, other = here.begun("a", max_tokens=5), here.begun("b", max_tokens=5)
        assert (await other).versions.tolist() == [1] * 5, "others begin while it waits"
        assert not update.done() and not late.done() and 0 in here.lengths()
        assert not calls["b"].done()
    version = await update
    done = {policy: await call for policy, call in calls.items()}
    if mode == "finish":
        assert done["a"].versions.tolist() == [1] * 75
        last = await late
        assert last.versions.tolist() == [2] * 5 and last.cached_tokens == 0
        expect_sampled_by(NEW, TEXTS["a"], last)
    else:
        assert set(done["a"].versions.tolist()) == {1, 2} and done["a"].sources[1] == version
        rows = [reference_logprobs(model, TEXTS["a"], done["a"].tokens) for model in (here.models["a"], NEW)]
        stamped = np.stack(rows)[done["a"].versions - 1, np.arange(75)]
        gap = np.abs(done["a"].logprobs - stamped)
        first = int(np.argmax(done["a"].versions))
        assert gap[:first].max() < 2e-5 and (gap[first:].max() < 2e-5) == (mode == "recompute")
    for policy, step in (("b", 1), ("judge", 0)):
        assert done[policy].versions.tolist() == [step] * 75
        expect_sampled_by(here.models[policy], TEXTS[policy], done[policy])


async def test_the_prefix_cache_of_other_policies_stays(scene: Any) -> None:
    here = await scene()
    text = prompts(1, 30, 31)[0]
    for policy in ("a", "b"):
        await here.engine.generate(asked(policy, text))
    for step in (2, 3, 4):
        await here.engine.update(here.receiver.publish(Version(step, policy="a"), trained("a", step)))
    for other in prompts(4, 30, 31, seed=1):  # take the pages of versions that are gone, and no others
        await here.engine.generate(asked("a", other))
    a, b = [await here.engine.generate(asked(policy, text)) for policy in ("a", "b")]
    assert a.cached_tokens == 0 and b.cached_tokens == 28
    expect_sampled_by(trained("a", 4), text, a)
    expect_sampled_by(here.models["b"], text, b)


def with_number(model: Decoder, number: float) -> Decoder:
    _, adapter = next(adapters(model))
    with torch.no_grad():
        adapter.b[0][1, 2] = number
    return model


def pieces(policy: str, seed: int) -> list[Slice]:
    return pieces_of(trained(policy, seed), CONFIGS[policy])


TRUE = fingerprint(pieces("a", 2))  # of the version that is announced
# Each wrong update, and what the engine says of it.
REFUSED: dict[str, tuple[Callable[[AdapterReceiver], WeightUpdate], str]] = {
    "NaN": (lambda r: r.publish(Version(2, policy="a"), with_number(trained("a", 2), math.nan)), "is not finite"),
    "infinite": (lambda r: r.publish(Version(2, policy="a"), with_number(trained("a", 2), math.inf)), "is not finite"),
    "older": (lambda r: r.publish(Version(0, policy="a"), NEW), "a@v0 is older than a@v1"),
    "frozen": (lambda r: r.publish(Version(1, policy="judge"), trained("judge", 2)), "would update a frozen policy"),
    "unknown": (lambda r: r.publish(Version(2, policy="c"), trained("c", 2)), "c@v2 is not of the policy"),
    "unnamed": (lambda r: r.send(Version(2), pieces("a", 2)), "policy@v2 is not of the policy"),
    "of another base": (
        lambda r: replace(r.publish(Version(2, policy="a"), NEW), base=base_version("f" * 32)),
        "an adapter of a base with fingerprint ffff",
    ),
    "of another policy": (lambda r: r.send(Version(2, policy="a"), pieces("b", 2), TRUE), "of the fingerprint"),
    "unchanged": (lambda r: r.send(Version(2, policy="a"), pieces("a", 1), TRUE), "of the fingerprint"),
    "without a fingerprint": (
        lambda r: replace(r.publish(Version(2, policy="a"), NEW), version=Version(2, policy="a")),
        r"not a@v2 \(fingerprint none\)",
    ),
    "of another rank": (
        lambda r: r.publish(Version(2, policy="a"), NEW, replace(CONFIGS["a"], rank=3)),
        r"is \[4, 32\], expected \[3, 32\]",
    ),
    "whole weights": (
        lambda r: WeightUpdate(Version(2, policy="a", fingerprint="f"), (WeightPart("memory", "0"),)),
        "'adapter', but a@v2 is of kind 'full'",
    ),
}


async def test_what_is_wrong_is_refused_and_all_policies_are_served_as_before(scene: Any) -> None:
    here = await scene()

    async def served() -> list[Any]:
        done = [await here.engine.generate(asked(policy, text, temperature=0.0)) for policy, text in TEXTS.items()]
        return [(each.tokens.tolist(), each.logprobs.tolist(), each.sources) for each in done]

    await served()  # its prompts are in the cache from now on
    before, stats = await served(), await here.engine.stats()
    for why, (update, says) in REFUSED.items():
        with pytest.raises((PolicyMismatch, ValueError), match=says):
            await here.engine.update(update(here.receiver))
            pytest.fail(f"{why}: it was taken")
        assert await served() == before and (await here.engine.stats()).version == stats.version, why
    right = here.next_one()
    assert await here.engine.update(right) == right.version
    after = await served()
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]


def relabelled(old: Weights, new: Weights) -> Weights:
    return replace(old, version=new.version)


def altered(adapter: PlacedAdapter) -> PlacedAdapter:
    """A copy with one other number."""
    matrices = copy.deepcopy(adapter.matrices)
    first = matrices[0]
    assert first is not None
    with torch.no_grad():
        first.b[0][3, 1] += 1e-3
    return replace(adapter, matrices=matrices)


def side(weights: Weights) -> SideAdapters:
    assert weights.adapters is not None
    return weights.adapters


def placed(weights: Weights, number: int) -> PlacedAdapter:
    found = side(weights).by_policy[number]
    assert found is not None
    return found


def with_base_changed(old: Weights, new: Weights) -> Weights:
    new.decoder.norm.weight[3] += 1
    return new


def with_packed_changed(old: Weights, new: Weights) -> Weights:
    layer = new.decoder.layers[1].o
    assert isinstance(layer, Linear)
    (layer.weight if layer.packed.numbers is None else layer.packed.numbers).view(-1)[7] += 1
    return new


def with_a_matrix_unplugged(old: Weights, new: Weights) -> Weights:
    layer = new.decoder.layers[0].down
    assert isinstance(layer, Linear)
    layer.adapter = None
    return new


def with_another_scale(old: Weights, new: Weights) -> Weights:
    first = placed(new, 0).matrices[0]
    assert first is not None
    first.factors = tuple(replace(factor, scale=factor.scale / 2) for factor in first.factors)
    return new


COMMITS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "nothing": (lambda old, new: old, "committed was a@v2, staged a@v2, and b@v1 is served"),
    "a new label on the old adapters": (relabelled, r"the adapter that is served is a@v1 \(fingerprint"),
    "in the place of another policy": (
        lambda old, new: replace(new, adapters=side(old).having(1, placed(new, 0))),
        "the adapter that is served is a@v1",
    ),
    "for every policy": (
        lambda old, new: replace(new, adapters=side(new).having(1, altered(placed(old, 1)))),
        "b@v1 was staged and committed, but another adapter is served",
    ),
    "an adapter with another number": (
        lambda old, new: replace(new, adapters=side(new).having(0, altered(placed(new, 0)))),
        "a@v2 was staged and committed, but another adapter is served",
    ),
    "with another scale": (with_another_scale, "has another rank or scale"),
    "no adapters": (lambda old, new: replace(new, adapters=None), "steps compute without the adapters"),
    "a matrix less": (with_a_matrix_unplugged, "steps compute without the adapters"),
    "compiled decoding": (
        lambda old, new: replace(new, decoding=decoding_weights(new.decoder) or pytest.skip("nothing is packed here")),
        "steps compute without the adapters",
    ),
    "another base": (with_base_changed, r"other weights are served: model\.norm\.weight differs"),
    "another packed copy": (with_packed_changed, r"other weights are served: model\.layers\.1\.self_attn\.o_proj"),
    "another head": (
        lambda old, new: replace(new, head=new.head + 1),
        "the head that is served is another one",
    ),
}


@pytest.mark.parametrize("name", COMMITS)
async def test_a_commit_that_does_something_else_is_found(scene: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, (commit, says) = await scene(), COMMITS[name]
    swap = WeightUpdater._swap
    monkeypatch.setattr(WeightUpdater, "_swap", lambda self, staged: swap(self, commit(self.weights, staged)))
    with pytest.raises(PolicyMismatch, match=says):
        await here.engine.update(here.next_one())
    with pytest.raises(EngineFailed):
        await here.engine.generate(asked("b", TEXTS["b"]))


async def test_an_adapter_that_changed_since_is_found_by_the_next_update_of_another(scene: Any) -> None:
    here = await scene()
    first = placed(here.engine._updates.weights, 1).matrices[0]
    assert first is not None
    with torch.no_grad():
        first.a[0][0, 0] += 1
    with pytest.raises(PolicyMismatch, match="b@v1 was staged and committed, but another adapter is served"):
        await here.engine.update(here.next_one())


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "collective", "direct"])
async def test_trainers_of_several_policies_publish_by_turns(transport: str, tmp_path: Path) -> None:
    engine = side_by_side(make_receiver(transport), ("a", "b"))
    trainers = dict[str, NativeTrainer]()
    for policy in ("a", "b"):
        sender = make_sender(SyncSettings.model_validate({"transport": transport}), tmp_path / policy)
        how: dict[str, Any] = {"lora": CONFIGS[policy], "adapter_alone": True, "policy": policy}
        settings = TrainerSettings(device="cpu")
        trainers[policy] = NativeTrainer(trained(policy, 1), settings, steps=1, sender=sender, **how)
    pool = EnginePool([Member("engine-0", engine, await engine.capabilities())])
    try:
        async with asyncio.timeout(120):
            for step in range(3):
                for policy, trainer in trainers.items():
                    version = await PoolPublisher(trainer, pool).publish(Version(step, policy=policy))
                    assert (await engine.stats()).version == version and version.policy == policy
                for policy, trainer in trainers.items():
                    done = await engine.generate(asked(policy, TEXTS[policy]))
                    assert done.versions.tolist() == [step] * 20
                    expect_sampled_by(trainer.decoder, TEXTS[policy], done)
                    with torch.no_grad():
                        for _, adapter in adapters(trainer.decoder):
                            adapter.b[0].mul_(-1)
    finally:
        await engine.close()
        for trainer in trainers.values():
            await trainer.close()
