"""`tidemill parity`: it holds for every family, and what is broken is caught."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import ENGINE_PATHS, model_folder

from tidemill.cli import backend_parity as checks
from tidemill.cli.commands.parity import parity
from tidemill.core.errors import ConfigError, UnsupportedModel
from tidemill.core.types import GenerateRequest
from tidemill.engine.native import paged_attention
from tidemill.engine.native.native_engine import NativeEngine
from tidemill.engine.native.paged_attention import PagedCache
from tidemill.models import decoder as decoders

pytestmark = pytest.mark.runs

FAMILIES = ["llama3-biases", "mistral-window", "qwen2-upper-window", "qwen3"]


def run(folder: Path, capsys: pytest.CaptureFixture[str], length: int = 24) -> tuple[int, dict[str, Any]]:
    status = parity(folder, length, as_json=True)
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", FAMILIES)
def test_holds_for_every_family(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(model_folder(name, tmp_path / "m"), capsys, 48)
    assert status == 0 and report["ok"] and report["family"] in name and not report["text"]
    assert 0 < report["max"] <= report["tolerance"] == 1e-4
    judged = {(c["what"], c["pair"]): c for c in report["comparisons"]}
    pairs = ("engine - transformers", "engine - trainer", "trainer - transformers")
    assert {(path, pair) for path in ENGINE_PATHS for pair in pairs} <= set(judged)
    assert all(c["tokens"] >= 50 for c in judged.values())
    assert report["evidence"]["cached tokens"] > 0 and report["evidence"]["preemptions"] > 0
    assert judged["saved by Tidemill", "transformers"]["max"] == judged["saved by transformers", "Tidemill"]["max"] == 0
    low = judged["bfloat16", "engine - trainer"]
    assert low["limit"] is None and low["ok"] is None and report["max"] < low["mean"] < 1


def test_text_where_there_is_a_tokenizer_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tidemill.models.new_model import SIZES, fresh_model

    fresh_model(tmp_path / "model", alphabet="abcdefghij .", **SIZES["2m"], context=64)  # wide enough for sums to differ
    assert parity(tmp_path / "model", 16, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "random tokens and text" in shown and "parity holds" in shown and "identical" in shown
    for path in ENGINE_PATHS:
        assert path in shown


def failed(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(c["what"], c["pair"]) for c in report["comparisons"] if c["ok"] is False}


def test_a_wrong_decoder_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and trainer share it, and agree: only transformers can tell."""
    folder = model_folder("llama3-biases", tmp_path / "m")
    monkeypatch.setattr(
        decoders, "rope_frequencies", lambda arch: 1 / 1e4 ** (torch.arange(0, arch.head_dim, 2) / arch.head_dim)
    )
    status, report = run(folder, capsys)
    assert status == 1 and not report["ok"]
    assert failed(report) == {(path, f"{who} - transformers") for path in ENGINE_PATHS for who in ("engine", "trainer")}


def test_a_wrong_engine_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key in the paged cache is off by a little: the trainer and transformers agree, the engine does not."""
    folder = model_folder("qwen3", tmp_path / "m")
    attend = PagedCache.attend

    def shifted(self: PagedCache, *given: Any) -> Any:
        inner = attend(self, *given)
        return lambda layer, q, k, v: inner(layer, q, k * 1.01 if layer == 1 else k, v)

    monkeypatch.setattr(paged_attention.PagedCache, "attend", shifted)
    status, report = run(folder, capsys)
    assert status == 1
    assert failed(report) == {(path, f"engine - {who}") for path in ENGINE_PATHS for who in ("transformers", "trainer")}


def test_a_wrong_sampler_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs at temperature 1 where 0.7 was sampled."""
    generate = NativeEngine.generate

    async def unmodified(self: Any, request: GenerateRequest) -> Any:
        completion = await generate(self, replace(request, extras=("model_logprobs",)))
        completion.logprobs = completion.extras["model_logprobs"]
        return completion

    monkeypatch.setattr(NativeEngine, "generate", unmodified)
    status, report = run(model_folder("qwen2", tmp_path / "m"), capsys)
    assert status == 1
    sampled = [path for path in ENGINE_PATHS if path != "score"]
    assert failed(report) == {(path, f"engine - {who}") for path in sampled for who in ("transformers", "trainer")}


def test_a_wrong_save_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    save = checks.save_folder

    def lossy(decoder: Any, folder: Path, **more: Any) -> None:
        save(decoder, folder, **more | {"dtype": torch.bfloat16})

    monkeypatch.setattr(checks, "save_folder", lossy)
    status, report = run(model_folder("llama", tmp_path / "m"), capsys)
    assert status == 1 and failed(report) == {("saved by Tidemill", "transformers")}


def test_a_path_that_was_not_taken_is_no_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_crowd", lambda arch, prompts, length: (prompts, checks.EngineSettings(device="cpu")))
    report = asyncio.run(checks.check(model_folder("llama", tmp_path / "m"), 24))
    assert all(c.ok for c in report.comparisons) and report.evidence["preemptions"] == 0 and not report.ok


def test_not_a_number_is_no_agreement() -> None:
    nan = checks._compare("paged", "engine - trainer", [np.array([-1.0, np.nan])], [np.array([-1.0, -2.0])])
    assert not nan.ok and nan.verdict == "FAILED" and nan.worst == "row 0, at 1: nan against -2"


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        parity(tmp_path / "nothing", 16, as_json=True)
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        parity(tmp_path, 16, as_json=True)
    folder = model_folder("llama", tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModel, match="gpt2"):
        parity(folder, 16, as_json=True)
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 4}))
    with pytest.raises(ConfigError, match="too short"):
        parity(folder, 16, as_json=True)
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 4}))
    with pytest.raises(UnsupportedModel, match="missing"):
        parity(folder, 16, as_json=True)
    (folder / "config.json").write_text(json.dumps(raw))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(UnsupportedModel, match="not a readable safetensors file"):
        parity(folder, 16, as_json=True)
    weights.write_bytes(whole[:-4] + b"\x00\x00\xc0\x7f")
    with pytest.raises(ConfigError, match="NaN"):
        parity(folder, 16, as_json=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.sqlite").touch()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        parity(tmp_path / "run", 16, as_json=True)
