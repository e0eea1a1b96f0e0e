"""The engine over `transformers` keeps the contract, as does one of a user's own file, which joins by the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_base import EOS, FREE, LONG, PROMPT, TOLERANCE, VOCAB, Reference, new_version, until
from engine_contract import EngineContract
from entropy_engine import ENTROPY, EntropyEngine, EntropySettings
from test_engine_contract import TestNativeEngine
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig

import tidemill
from tidemill.core.errors import ConfigError, EngineFailed, PolicyMismatch
from tidemill.core.interfaces import Engine
from tidemill.core.token_extras import MODEL_LOGPROBS, TokenExtra
from tidemill.core.types import GenerateRequest, InFlight, Version
from tidemill.engine.engine_kinds import ENGINES
from tidemill.engine.transformers.causal_model import CausalModel
from tidemill.engine.transformers.transformers_engine import TransformersEngine
from tidemill.engine.transformers.transformers_settings import TransformersSettings
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.capability_check import OLDEST, UNPROVEN
from tidemill.weight_sync.transport import make_receiver

LOSSES = Path(__file__).with_name("extra_losses.py")
MODULE = Path(__file__).with_name("entropy_engine.py")


def made(kind: type[TransformersEngine], settings: TransformersSettings, folder: Path) -> Engine:
    model = CausalModel(folder, getattr(torch, settings.dtype), torch.device("cpu"))
    assert model.ends == (EOS,)
    return kind(model, settings, receiver=make_receiver("shared_memory"), version=Version(0), name="engine-0")


@pytest.mark.engines
class TestTransformersEngine(EngineContract):
    def make(self, folder: Path) -> Engine:
        return made(TransformersEngine, TransformersSettings(device="cpu"), folder)


@pytest.mark.engines
class TestEntropyEngine(EngineContract):
    def make(self, folder: Path) -> Engine:
        return made(EntropyEngine, EntropySettings(device="cpu"), folder)


def served(folder: Path, **settings: Any) -> TransformersEngine:
    return made(TransformersEngine, TransformersSettings(device="cpu", **settings), folder)  # type: ignore[return-value]


async def test_it_samples_what_the_native_engine_samples(tmp_path: Path) -> None:
    """With equal noise and nearly equal logits, whatever the parameters."""
    model = Reference.make(tmp_path, seed=5)
    ours, native = served(tmp_path), TestNativeEngine().make(tmp_path)
    adjusted = replace(
        FREE, min_tokens=4, ignore_eos=False, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 2.0),)
    )
    asked = [FREE, replace(FREE, seed=-3, temperature=0.6, top_k=7, top_p=0.9), replace(FREE, min_p=0.1), adjusted]
    for params in asked:
        request = GenerateRequest(PROMPT, replace(params, top_logprobs=2), extras=("model_logprobs",))
        one, other = [await engine.generate(request) for engine in (ours, native)]
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish is other.finish
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=TOLERANCE)
        np.testing.assert_allclose(one.extras["model_logprobs"], model.logprobs(PROMPT, one.tokens), atol=TOLERANCE)
        assert (one.support is None) == (other.support is None)
        if one.support is not None and other.support is not None:
            assert one.support.ids.tolist() == other.support.ids.tolist()
    one, other = [await engine.score(PROMPT, "policy", 0.7, 3) for engine in (ours, native)]
    assert one.top_ids is not None and one.top_ids.tolist() == other.top_ids.tolist()
    await ours.close()
    await native.close()


@pytest.mark.parametrize("mode", InFlight)
async def test_each_mode_says_what_an_update_means_for_a_row_in_flight(tmp_path: Path, mode: InFlight) -> None:
    old, new = [Reference.make(tmp_path / str(seed), seed) for seed in (0, 1)]
    engine = served(old.folder, in_flight=mode.value)
    async with new_version(new.folder, tmp_path, 1) as update:
        call = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, LONG)))

        async def under_way() -> bool:
            return (await engine.stats()).generated > 3

        await until(under_way)
        later = asyncio.ensure_future(engine.update(update))
        async with asyncio.timeout(60):
            while mode is InFlight.FINISH and not engine._draining:
                await asyncio.sleep(0)
        next_one = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, FREE)))
        done, _, after = await call, await later, await next_one
    split = int((done.versions == 0).sum())
    by_new = new.logprobs(PROMPT, done.tokens)
    np.testing.assert_allclose(done.logprobs[:split], old.logprobs(PROMPT, done.tokens)[:split], atol=TOLERANCE)
    if mode is InFlight.FINISH:
        assert split == len(done.tokens) and set(after.versions.tolist()) == {1}, "what comes later waits for the update"
    elif mode is InFlight.RECOMPUTE:
        assert 3 < split < len(done.tokens)
        np.testing.assert_allclose(done.logprobs[split:], by_new[split:], atol=TOLERANCE)
    else:
        assert 3 < split < len(done.tokens)
        assert np.abs(done.logprobs[split:] - by_new[split:]).max() > 10 * TOLERANCE, "the KV is the old weights'"
    await engine.close()


@pytest.mark.parametrize("of_cache", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=EOS),
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=EOS),
    ],
    ids=["gpt2", "mamba"],
)
async def test_it_serves_models_that_nothing_else_here_computes(tmp_path: Path, config: Any, of_cache: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    engine = served(tmp_path, context=48)
    assert engine._model._cached == (config.model_type == "gpt2")
    engine._model._cached &= of_cache
    done = await engine.generate(GenerateRequest(PROMPT, LONG))
    whole = torch.from_numpy(np.concatenate([PROMPT, done.tokens]).astype(np.int64))
    assert len(whole) == 48
    with torch.no_grad():
        rows = torch.log_softmax(model(whole[None]).logits[0].double(), -1)
    expected = rows[:-1].gather(1, whole[1:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(done.logprobs, expected[len(PROMPT) - 1 :], atol=TOLERANCE)
    scored = await engine.score(whole.numpy(), "policy", 1.0, 0)
    np.testing.assert_allclose(scored.logprobs[1:], expected, atol=TOLERANCE)
    await engine.close()


async def test_a_cache_that_is_not_exact_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Reference.make(tmp_path, seed=0).folder
    forward = CausalModel._forward

    def wrong(self: CausalModel, ids: list[int], cache: Any, more: dict[str, Any]) -> Any:
        logits, cache_after = forward(self, ids, cache, more)
        return (logits + 0.1 if cache is not None else logits), cache_after

    assert served(folder)._model._cached
    monkeypatch.setattr(CausalModel, "_forward", wrong)
    assert not served(folder)._model._cached


async def test_weights_that_are_not_served_as_they_came_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = [Reference.make(tmp_path / str(seed), seed) for seed in (0, 1)]
    engine, load = served(old.folder), CausalModel.load
    monkeypatch.setattr(CausalModel, "load", lambda self, weights: load(self, dict([*weights.items()][1:])))
    async with new_version(new.folder, tmp_path, 1) as update:
        with pytest.raises(PolicyMismatch, match=r"serves weights of the fingerprint .*, not policy@v1"):
            await engine.update(update)
        with pytest.raises(EngineFailed):
            await engine.generate(GenerateRequest(PROMPT, FREE))
    await engine.close()


async def test_weights_of_another_dtype_or_model_are_refused(tmp_path: Path) -> None:
    old, new = [Reference.make(tmp_path / str(seed), seed) for seed in (0, 1)]
    async with new_version(new.folder, tmp_path, 1) as update:
        engine = served(old.folder, dtype="bfloat16")
        with pytest.raises(PolicyMismatch, match=r"engine\.dtype and trainer\.serving_dtype must be alike"):
            await engine.update(update)
        assert (await engine.generate(GenerateRequest(PROMPT, FREE))).versions.tolist() == [0] * 20
        await engine.close()
    ends = {"bos_token_id": 1, "eos_token_id": EOS}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, **ends)).save_pretrained(tmp_path / "other")
    deeper = LlamaConfig.from_pretrained(old.folder, num_hidden_layers=3)
    LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
    async with new_version(new.folder, tmp_path, 2) as update:
        for name, says in (("other", "is no weight of this model"), ("deeper", r"the update lacks model\.layers\.2")):
            engine = served(tmp_path / name)
            with pytest.raises(PolicyMismatch, match=says):
                await engine.update(update)
            await engine.close()


async def test_versions_only_go_forward(tmp_path: Path) -> None:
    old, new = [Reference.make(tmp_path / str(seed), seed) for seed in (0, 1)]
    engine = served(old.folder)
    async with new_version(new.folder, tmp_path / "a", 2) as second, new_version(old.folder, tmp_path / "b", 1) as first:
        await engine.update(second)
        with pytest.raises(PolicyMismatch, match="versions only go forward"):
            await engine.update(first)
    await engine.close()


def test_a_folder_that_transformers_cannot_load_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match="`transformers` cannot load a causal model from there") as error:
        served(tmp_path)
    assert "\n" not in str(error.value)


@pytest.fixture
def registered() -> Iterator[None]:
    ENGINES.register("entropy", f"{MODULE}:EntropySettings", f"{MODULE}:build")
    yield
    ENGINES.unregister("entropy")


def trained(tmp_path: Path, engine: str, **given: Any) -> Any:
    fresh_model(tmp_path / "model", alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    settings = {
        "env": {"kind": "guess", "low": 1, "high": 4, "turns": 2},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep"},
        "eval": {"every": 0, "tasks": 2, "final_tasks": 2},
        "record": {"probe_every": 1},
        "engine": {"kind": engine, "device": "cpu"},
    }
    places = {"model": tmp_path / "model", "run_dir": tmp_path / "run", "placement": "inline"}
    return tidemill.train(**settings | places | {"steps": 2, "quiet": True} | given)


def test_it_serves_a_run(registered: None, tmp_path: Path) -> None:
    assert trained(tmp_path / "built in", "transformers").complete
    run = trained(tmp_path, "entropy")
    assert run.complete and run.steps == 2
    with SqliteLedger(run.folder, mode="read") as ledger:
        said = [event.detail["how"].partition(": ")[2] for event in ledger.events("engine_adapted")]
        versions = [version.step for version in ledger.versions()]
    assert said == [OLDEST, UNPROVEN] and versions == [0, 1, 2]


@pytest.mark.parametrize(
    ("engine", "loss", "extra"),
    [("entropy", "by_entropy", ENTROPY), ("native", "by_surprise", MODEL_LOGPROBS)],
)
def test_a_loss_reads_what_the_engine_returns_with_each_token(
    registered: None, tmp_path: Path, engine: str, loss: str, extra: TokenExtra
) -> None:
    seen: list[dict[str, float]] = []
    algorithm = {"name": "grpo", "zero_variance": "keep", "loss": f"{LOSSES}:{loss}"}
    run = trained(tmp_path, engine, algorithm=algorithm, max_lag=0, callbacks=[lambda step, metrics: seen.append(metrics)])
    assert run.complete and [m["train/of_engine"] > 0 for m in seen if "train/of_engine" in m] == [True] * 2
    with SqliteLedger(run.folder, mode="read") as ledger:
        for number in range(4):
            for t in ledger.load(number).trajectories:
                entries = t.extras.pop(extra.name)
                assert entries.dtype == extra.dtype and entries.shape == t.tokens.shape and not t.extras
                assert (entries[~t.mask] == extra.fill).all() and (entries[t.mask] != extra.fill).all()


@pytest.mark.parametrize(
    ("engine", "loss", "says"),
    [
        (
            "native",
            "by_entropy",
            "reads the token extra 'entropy', and engine.kind = 'native' returns 'model_logprobs': take",
        ),
        ("entropy", "of_another_kind", "reads .* as .entropy: float64 .*'entropy' returns .entropy: float32"),
        ("native", "missing", "extra_losses.py has no 'missing'"),
    ],
)
def test_a_loss_that_an_engine_cannot_serve_is_refused_before_the_run(
    registered: None, tmp_path: Path, engine: str, loss: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, engine, algorithm={"name": "grpo", "loss": f"{LOSSES}:{loss}"})
