"""Engines of several policies from their spec: folders that are served as they are, a quantised base, and refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_contract import NARROW, PLAIN, SCALED, by_peft, decoder_with, sent_by
from contract_base import FREE, PROMPT, TOLERANCE, Reference

from tidemill.core.errors import PolicyMismatch, UnsupportedModel
from tidemill.core.interfaces import Capabilities
from tidemill.core.types import GenerateRequest, Version
from tidemill.core.weight_update import UpdateSupport
from tidemill.engine.engine_kinds import EngineSpec
from tidemill.engine.native.build_native_engine import build
from tidemill.engine.native.engine_settings import EngineSettings
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.models.adapter_config import AdapterConfig, BaseDtype
from tidemill.models.adapter_files import export_adapter
from tidemill.models.adapter_update import folder_fingerprint
from tidemill.models.hf_weights import load_folder
from tidemill.models.lora import gathered_factors
from tidemill.models.served_weights import Contents
from tidemill.runtime.cpu_sharing import Cores
from tidemill.trainer.native_trainer import NativeTrainer
from tidemill.trainer.trainer_kinds import TrainerSettings
from tidemill.weight_sync.transport import make_receiver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.make(tmp_path_factory.mktemp("base"), 0)


def spec_of(folder: Path, **given: Any) -> EngineSpec:
    settings = EngineSettings(device="cpu", max_sequences=8, page_size=4)
    return EngineSpec(**{"model": folder, "engine": settings, "transport": "shared_memory", **given})


def frozen_in(folder: Path, model: Reference, config: AdapterConfig, seed: int) -> Path:
    export_adapter(gathered_factors(decoder_with(model.folder, config, seed)), config, folder)
    return folder


@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
async def test_trained_and_frozen_policies_are_served_as_peft_computes_them(
    model: Reference, tmp_path: Path, base_dtype: BaseDtype
) -> None:
    configs = {name: replace(config, base_dtype=base_dtype) for name, config in (("a", PLAIN), ("b", SCALED))}
    of_judge = replace(PLAIN, rank=2, base_dtype=base_dtype)
    judge = by_peft(model, decoder_with(model.folder, of_judge, 7), of_judge, tmp_path / "judge")
    spec = spec_of(model.folder, policies=("a", "b"), frozen={"judge": judge.folder}, base_dtype=base_dtype)
    engine, expected = build(spec, make_receiver("shared_memory"), Cores()), {"judge": judge}
    try:
        served = (await engine.generate(GenerateRequest(PROMPT, FREE, "judge"))).sources
        assert served == (Version(0, policy="judge", fingerprint=folder_fingerprint(judge.folder)),)
        for seed, (name, config) in enumerate(configs.items()):
            first = await engine.generate(GenerateRequest(PROMPT, FREE, name))
            assert first.sources == (Version(-1, policy=name),), "before its first publication"
            decoder = decoder_with(model.folder, config, seed)
            expected[name] = by_peft(model, decoder, config, tmp_path / name)
            how: dict[str, Any] = {"lora": config, "adapter_alone": True, "policy": name}
            sender = sent_by("shared_memory", tmp_path / f"sent-{name}")
            trainer = NativeTrainer(decoder, TrainerSettings(device="cpu"), steps=1, sender=sender, **how)
            update = await trainer.publish(Version(3, policy=name))
            assert await engine.update(update) == update.version
            await trainer.close()
        calls = [engine.generate(GenerateRequest(PROMPT, replace(FREE, seed=i), name)) for i, name in enumerate(expected)]
        for name, done in zip(expected, await asyncio.gather(*calls), strict=True):
            np.testing.assert_allclose(done.logprobs, expected[name].logprobs(PROMPT, done.tokens), atol=TOLERANCE)
    finally:
        await engine.close()


async def test_frozen_policies_alone_need_no_transport(model: Reference, tmp_path: Path) -> None:
    folder = frozen_in(tmp_path / "judge", model, SCALED, 3)
    engine = build(spec_of(model.folder, frozen={"judge": folder}, transport=None), None, Cores())
    assert (await engine.capabilities()).updates == UpdateSupport(())
    done = await engine.generate(GenerateRequest(PROMPT, FREE, "judge"))
    assert done.sources[0].step == 0
    with pytest.raises(ValueError, match="serves 'judge'"):
        await engine.generate(GenerateRequest(PROMPT, FREE))
    await engine.close()


def test_what_a_spec_of_several_policies_takes(model: Reference) -> None:
    spec = spec_of(model.folder, policies=("a", "b"))
    carried = UpdateSupport(("full", "delta", "adapter"), several_parts=True)
    assert spec.side_by_side and spec.takes(carried).kinds == ("adapter",) and spec.takes(None).kinds == ()
    assert not spec_of(model.folder).side_by_side and spec_of(model.folder).takes(carried).kinds == ("full", "delta")
    assert not Capabilities(9).policies


async def test_one_policy_is_served_as_before(model: Reference) -> None:
    engine = build(spec_of(model.folder), make_receiver("shared_memory"), Cores())
    assert engine._updates.weights.adapters is None and (await engine.capabilities()).policies
    await engine.close()
    invariant = build(spec_of(model.folder, engine=settings_of(batch_invariant=True)), None, Cores())
    assert not (await invariant.capabilities()).policies
    await invariant.close()


def settings_of(**given: Any) -> EngineSettings:
    return EngineSettings(device="cpu", max_sequences=8, page_size=4, **given)


async def test_a_model_that_nothing_updates_proves_its_version_by_its_weights(model: Reference) -> None:
    spec = spec_of(model.folder, transport=None, serves="judge", proves=True)
    engine = build(spec, None, Cores())
    own = Contents.of(load_folder(model.folder), torch.float32).fingerprint
    done = await engine.generate(GenerateRequest(PROMPT, FREE, "judge"))
    assert done.sources == (Version(0, policy="judge", fingerprint=own),)
    with pytest.raises(ValueError, match="serves 'judge'"):
        await engine.generate(GenerateRequest(PROMPT, FREE))
    await engine.close()


def test_a_folder_that_is_no_adapter_of_the_model_is_refused(model: Reference, tmp_path: Path) -> None:
    wide = Reference.make(tmp_path / "wide", 0, head_dim=12)
    folder = frozen_in(tmp_path / "other", wide, PLAIN, 1)
    with pytest.raises(UnsupportedModel, match=r"policy 'judge': .*q_proj\.lora_B\.weight is \[48, 4\], expected \[32, 4\]"):
        build(spec_of(model.folder, policies=("a",), frozen={"judge": folder}), make_receiver("shared_memory"), Cores())
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json"):
        build(spec_of(model.folder, policies=("a",), frozen={"judge": tmp_path / "none"}), None, Cores())


@pytest.mark.parametrize(("of_adapter", "of_run", "refused"), [("nf4", "float32", True), ("float32", "nf4", False)])
async def test_an_adapter_of_a_base_in_other_numbers_is_refused(
    model: Reference, tmp_path: Path, of_adapter: BaseDtype, of_run: BaseDtype, refused: bool
) -> None:
    """PEFT drops what says that a base was quantised, so a folder that does not say so may be of either."""
    folder = frozen_in(tmp_path / "judge", model, replace(PLAIN, base_dtype=of_adapter), 1)
    spec = spec_of(model.folder, frozen={"judge": folder}, base_dtype=of_run)
    if refused:
        with pytest.raises(UnsupportedModel, match="its base had matrices in nf4, and those of this run are in float32"):
            build(spec, None, Cores())
    else:
        await build(spec, None, Cores()).close()


async def test_a_base_in_other_numbers_refuses_the_trainers_adapter(model: Reference, tmp_path: Path) -> None:
    engine = build(spec_of(model.folder, policies=("a",), base_dtype="float32"), make_receiver("shared_memory"), Cores())
    assert isinstance(engine, NativeEngine)
    sender, how = sent_by("shared_memory", tmp_path), {"lora": NARROW, "adapter_alone": True, "policy": "a"}
    decoder = decoder_with(model.folder, NARROW, 1)
    trainer = NativeTrainer(decoder, TrainerSettings(device="cpu"), steps=1, sender=sender, **how)  # type: ignore[arg-type]
    with pytest.raises(PolicyMismatch, match="is an adapter of a base with fingerprint"):
        await engine.update(await trainer.publish(Version(0, policy="a")))
    assert torch.is_tensor(engine._updates.weights.head)
    await trainer.close()
    await engine.close()
