"""What engines keep whose versions are adapters, held against PEFT: what is served, and each wrong adapter refused before.

A subclass gives `make`, as for `EngineContract`, of an engine that takes adapters of its folder's weights by a transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_base import FREE, LONG, PROMPT, TOLERANCE, Reference, new_version, until
from peft import PeftModel

from tidemill.controller.engine_pool import EnginePool, Member, PoolPublisher
from tidemill.core.errors import PolicyMismatch
from tidemill.core.interfaces import Engine
from tidemill.core.types import GenerateRequest, Version
from tidemill.core.weight_update import AddedTo, WeightUpdate
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.models.adapter_files import export_adapter
from tidemill.models.adapter_update import base_version, config_block
from tidemill.models.fingerprint import fingerprint
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.lora import adapter_blocks, adapters, attach, gathered_factors
from tidemill.models.quantised_base import load_quantised, load_served
from tidemill.models.served_weights import Contents
from tidemill.models.weight_slices import Slice
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.sync_settings import SyncSettings
from tidemill.weight_sync.transport import make_sender

PLAIN = AdapterConfig(rank=4, alpha=12)
SCALED = AdapterConfig(rank=9, alpha=6, rslora=True, targets=("q_proj", "v_proj", "down_proj"), rank_pattern={"v_proj": 2})
NARROW = replace(PLAIN, base_dtype="nf4")
STORED = ("shared_memory", "checkpoint")


def decoder_with(folder: Path, config: AdapterConfig, seed: int) -> Any:
    """The folder's model with an adapter in which nothing is 0, on a base of the configuration's numbers."""
    decoder, generator = load_quantised(folder, config.base_dtype), torch.Generator().manual_seed(seed)
    attach(decoder, config, generator)
    with torch.no_grad():
        for _, adapter in adapters(decoder):
            for b in adapter.b:
                b.normal_(0.0, 0.2, generator=generator)
    return decoder


def pieces_of(decoder: Any, config: AdapterConfig) -> list[Slice]:
    """An adapter as it travels."""
    return [config_block(config), *(replace(each, tensor=each.tensor.detach()) for each in adapter_blocks(decoder))]


def by_peft(model: Reference, decoder: Any, config: AdapterConfig, folder: Path) -> Reference:
    """The model with the decoder's adapter, as PEFT computes it."""
    export_adapter(gathered_factors(decoder), config, folder)
    fresh = type(model.model).from_pretrained(model.folder, dtype=torch.float32)
    fresh.load_state_dict(dict(hf_views(load_served(model.folder, config.base_dtype))), strict=False)
    return Reference(folder, PeftModel.from_pretrained(fresh, folder).eval())  # pyright: ignore[reportArgumentType]


def sent_by(transport: str, folder: Path) -> Any:
    return make_sender(SyncSettings.model_validate({"transport": transport}), folder)


def trainer_of(decoder: Any, config: AdapterConfig, transport: str, folder: Path) -> NativeTrainer:
    sender = sent_by(transport, folder)
    return NativeTrainer(decoder, TrainerSettings(device="cpu"), steps=1, sender=sender, lora=config, adapter_alone=True)


def changed(pieces: list[Slice], end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Slice]:
    return [replace(p, tensor=change(p.tensor.clone())) if p.name.endswith(end) else p for p in pieces]


def swapped(pieces: list[Slice], kind: str) -> list[Slice]:
    """A or B of two layers' q_proj exchanged."""
    one, other = (f"model.layers.{i}.self_attn.q_proj.{kind}.weight" for i in (0, 1))
    names = {one: other, other: one}
    return [replace(piece, name=names.get(piece.name, piece.name)) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Sent:
    """Adapters of one model, as damage is made of them."""

    now: list[Slice]
    before: list[Slice]  # of the version before
    other_rank: list[Slice]
    folder: Path


# Sent under the true version's fingerprint.
DAMAGE: dict[str, Callable[[Sent], list[Slice]]] = {
    "zero": lambda s: changed(s.now, "lora_B.weight", torch.zeros_like),
    "stale": lambda s: s.before,
    "another rank": lambda s: s.other_rank,
    "another alpha": lambda s: [config_block(replace(PLAIN, alpha=24)), *s.now[1:]],
    "another scale": lambda s: [config_block(replace(PLAIN, rslora=True)), *s.now[1:]],
    "A of two layers": lambda s: swapped(s.now, "lora_A"),
    "B of two layers": lambda s: swapped(s.now, "lora_B"),
    "no configuration": lambda s: s.now[1:],
    "one matrix lacks": lambda s: s.now[:-2],
}
# Sent under their own fingerprint: whole and unharmed, but no adapter of what this engine loaded.
FOREIGN: dict[str, Callable[[Sent], list[Slice]]] = {
    "no configuration": lambda s: s.now[1:],
    "another rank is named": lambda s: [config_block(replace(PLAIN, rank=2)), *s.now[1:]],
    "a matrix lacks": lambda s: s.now[:-1],
    "one matrix more": lambda s: [*s.now, Slice.whole("model.layers.9.mlp.up_proj.lora_A.weight", torch.ones(4, 32))],
    "no matrix is named": lambda s: [config_block(replace(PLAIN, targets=("other",))), *s.now[1:]],
}


class AdapterContract:
    """Everything that an engine keeps which takes adapters."""

    head_dim = 8
    transports: tuple[str, ...] = STORED

    def make(self, folder: Path, transport: str, base_dtype: BaseDtype) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Reference:
        return Reference.make(tmp_path_factory.mktemp("base"), 0, self.head_dim)

    @pytest.fixture
    async def engines(self, model: Reference) -> AsyncIterator[Callable[[str], Engine]]:
        """Makes engines, and closes them at the end."""
        made = list[Engine]()

        def make(transport: str = "shared_memory", base_dtype: BaseDtype = "float32") -> Engine:
            made.append(self.make(model.folder, transport, base_dtype))
            return made[-1]

        yield make
        for engine in made:
            await engine.close()

    @pytest.mark.parametrize("config", [PLAIN, SCALED, NARROW], ids=["lora", "rslora", "nf4"])
    async def test_it_serves_base_and_adapter_as_peft_does(
        self, engines: Callable[..., Engine], model: Reference, tmp_path: Path, config: AdapterConfig
    ) -> None:
        engine = engines(base_dtype=config.base_dtype)
        for step in (1, 2):  # the second one is added to the base, not to the first
            decoder = decoder_with(model.folder, config, step)
            expected = by_peft(model, decoder, config, tmp_path / f"adapter-{step}")
            trainer = trainer_of(decoder, config, "shared_memory", tmp_path / f"weights-{step}")
            try:
                update = await trainer.publish(Version(step))
                assert update.kind == "adapter" and update.bytes < update.whole
                assert await engine.update(update) == update.version
            finally:
                await trainer.close()
            done = await engine.generate(GenerateRequest(PROMPT, FREE))
            assert [v.step for v in done.sources] == [step] and done.sources[0].fingerprint == update.version.fingerprint
            np.testing.assert_allclose(done.logprobs, expected.logprobs(PROMPT, done.tokens), atol=TOLERANCE)
            assert np.abs(done.logprobs - model.logprobs(PROMPT, done.tokens)).max() > 0.1, "it changes something"
            row = np.concatenate([PROMPT, done.tokens])
            scored = await engine.score(row, "policy", 1.0, 0)
            np.testing.assert_allclose(scored.logprobs[1:], expected.logprobs(row[:1], row[1:]), atol=TOLERANCE)

    async def test_a_request_in_flight_names_the_version_of_each_token(
        self, engines: Callable[..., Engine], model: Reference, tmp_path: Path
    ) -> None:
        decoder = decoder_with(model.folder, PLAIN, 1)
        trainer = trainer_of(decoder, PLAIN, "shared_memory", tmp_path)
        update = await trainer.publish(Version(1))
        steps, done = list[int](), None
        for _ in range(5):  # a reply may end before its update has been received
            engine = engines()
            before = (await engine.stats()).generated
            call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))

            async def under_way(engine: Engine = engine, before: int = before) -> bool:
                return (await engine.stats()).generated > before + 3

            await until(under_way)
            await engine.update(update)
            done = await call
            if 1 in (steps := done.versions.tolist()):
                break
        await trainer.close()
        assert done is not None and 1 in steps
        cut = steps.index(1)
        assert 0 < cut < len(steps) and steps == [0] * cut + [1] * (len(steps) - cut)
        np.testing.assert_allclose(done.logprobs[:cut], model.logprobs(PROMPT, done.tokens)[:cut], atol=TOLERANCE)

    async def test_every_wrong_adapter_is_refused_and_the_old_one_is_served(
        self, engines: Callable[..., Engine], model: Reference, tmp_path: Path
    ) -> None:
        wide = replace(PLAIN, rank=6)
        now, before = (pieces_of(decoder_with(model.folder, PLAIN, seed), PLAIN) for seed in (2, 1))
        sent = Sent(now, before, pieces_of(decoder_with(model.folder, wide, 2), wide), tmp_path)
        base = base_version(Contents.of(load_folder(model.folder), torch.float32).fingerprint)
        for transport in self.transports:
            engine = engines(transport)
            with published(sent, Version(1, fingerprint=fingerprint(before)), before, base, transport) as update:
                await engine.update(update)
            served = await engine.generate(GenerateRequest(PROMPT, replace(FREE, temperature=0.0)))
            true = Version(2, fingerprint=fingerprint(now))
            for why, damage in DAMAGE.items():
                with published(sent, true, damage(sent), base, transport) as update:
                    await refuses(engine, update, served.tokens, why)
            for why, foreign in FOREIGN.items():
                pieces = foreign(sent)
                with published(sent, Version(2, fingerprint=fingerprint(pieces)), pieces, base, transport) as update:
                    await refuses(engine, update, served.tokens, why)
            with published(sent, true, now, base_version("f" * 32), transport) as update:
                await refuses(engine, update, served.tokens, "wrong base")
            with published(sent, true, now, base, transport) as update:
                assert await engine.update(update) == true, "the right one is taken afterwards"

    async def test_whole_weights_are_no_adapter(
        self, engines: Callable[..., Engine], model: Reference, tmp_path: Path
    ) -> None:
        engine = engines()
        assert (await engine.capabilities()).updates.kinds == ("adapter",)
        async with new_version(model.folder, tmp_path, 1) as whole:
            with pytest.raises(ValueError, match=r"'adapter', but .* is of kind 'full'"):
                await engine.update(whole)

    @pytest.mark.parametrize("transport", ["collective", "direct"])
    async def test_it_receives_what_a_trainer_sends_live(
        self, engines: Callable[..., Engine], model: Reference, tmp_path: Path, transport: str
    ) -> None:
        engine = engines(transport)
        decoder = decoder_with(model.folder, SCALED, 3)
        expected = by_peft(model, decoder, SCALED, tmp_path / "adapter")
        trainer = trainer_of(decoder, SCALED, transport, tmp_path / "weights")
        try:
            await through_a_pool(trainer, engine, 1)
            done = await engine.generate(GenerateRequest(PROMPT, FREE))
        finally:
            await trainer.close()
        np.testing.assert_allclose(done.logprobs, expected.logprobs(PROMPT, done.tokens), atol=TOLERANCE)


async def through_a_pool(trainer: NativeTrainer, engine: Engine, step: int) -> None:
    """Publish a version as a run does, which lets a live update's two sides meet."""
    pool = EnginePool([Member("engine-0", engine, await engine.capabilities())])
    async with asyncio.timeout(120):
        await PoolPublisher(trainer, pool).publish(Version(step))


@contextmanager
def published(sent: Sent, version: Version, pieces: list[Slice], base: Version, transport: str) -> Iterator[WeightUpdate]:
    sender = sent_by(transport, sent.folder / "sent")
    try:
        yield sender.send(version, iter(pieces), AddedTo(base, "adapter"))
    finally:
        sender.close()


async def refuses(engine: Engine, update: WeightUpdate, before: np.ndarray, why: str) -> None:
    with pytest.raises(PolicyMismatch):
        await engine.update(update)
        pytest.fail(f"{why}: it was taken")
    done = await engine.generate(GenerateRequest(PROMPT, replace(FREE, temperature=0.0)))
    assert done.tokens.tolist() == before.tolist() and {v.step for v in done.sources} == {1}, why
