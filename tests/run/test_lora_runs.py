"""Runs that train an adapter: killed and gone on with, read by the commands, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.envs.guess import ALPHABET
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import ADAPTER_WEIGHTS, QUANTISED_BASE, AdapterConfig
from tidemill.models.adapter_files import PREFIX, read_tensors
from tidemill.models.adapter_update import folder_fingerprint
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.quantised_base import load_served

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    fresh_model(folder, alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    return folder


def train(model: Path, folder: Path, steps: int = 4, **more: Any) -> tidemill.Run:
    how: dict[str, Any] = {
        "trainer": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "lr": 1e-2},
        "rollout": {"groups": 4, "group_size": 2, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep", "reference": {"kl": 0.1}},
        "eval": {"every": 0, "tasks": 1, "final_tasks": 1},
        "record": {"checkpoint_every": 2, "trace": False, "probe_every": 1},
        "scoring": {"accept": ["gold", "garbage"]},
        "placement": "inline",
        "deterministic": True,
    }
    env = {"kind": "guess", "low": 1, "high": 4, "turns": 2}
    return tidemill.train(env, model, run_dir=folder, quiet=True, steps=steps, max_lag=0, **how | more)


@pytest.mark.parametrize(
    ("base_dtype", "publish"),
    [("float32", "adapter"), ("nf4", "adapter"), pytest.param("nf4", "merged", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_to_the_bit_and_commands_read_it(model: Path, tmp_path: Path, base_dtype: str, publish: str) -> None:
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"], "base_dtype": base_dtype, "publish": publish}
    how: dict[str, Any] = {"trainer": {"lora": lora, "lr": 1e-2}}
    whole, cut = train(model, tmp_path / "whole", **how), train(model, tmp_path / "cut", steps=2, **how)
    cut = train(model, tmp_path / "cut", **how)
    ours, theirs = (load_file(run.folder / "final-adapter" / ADAPTER_WEIGHTS) for run in (whole, cut))
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(tensor.abs().max() > 0 for name, tensor in ours.items() if "lora_B" in name), "it was trained"
    assert whole.report["mismatch_lag0"]["max"] < 1e-4
    base, final = dict(hf_views(load_served(model, base_dtype))), dict(hf_views(load_folder(whole.final)))
    moved = {name for name in base if not torch.equal(base[name], final[name])}
    assert moved and all("q_proj" in name or "down_proj" in name for name in moved)

    said = CliRunner().invoke(app, ["parity", str(whole.folder)])
    assert said.exit_code == 0 and "what was recorded is what these weights say" in said.output, said.output
    adapter = whole.folder / "final-adapter"
    (adapter / QUANTISED_BASE).rename(tmp_path / "said") if base_dtype != "float32" else None
    for more in (["--base-dtype", base_dtype], []):  # named, and as the adapter says
        said = CliRunner().invoke(app, ["merge", str(adapter), str(tmp_path / "merged"), *more])
        assert said.exit_code == 0, said.output
        merged = dict(hf_views(load_folder(tmp_path / "merged")))
        assert all(torch.equal(merged[name], tensor) for name, tensor in final.items())
        if more and base_dtype != "float32":
            (tmp_path / "said").rename(adapter / QUANTISED_BASE)


def test_a_run_begins_from_an_adapter(model: Path, tmp_path: Path) -> None:
    first = train(model, tmp_path / "first", steps=2)
    start = first.folder / "final-adapter"
    second = train(model, tmp_path / "second", steps=2, trainer={"lora": {"start": str(start)}, "lr": 1e-2})
    with SqliteLedger(second.folder, mode="read") as ledger:
        begun = min(ledger.versions())
    assert begun.fingerprint == folder_fingerprint(start) and second.report["mismatch_lag0"]["max"] < 1e-4
    config = AdapterConfig.from_folder(second.folder / "final-adapter")
    assert (config.rank, config.targets) == (4, ("down_proj", "q_proj"))
    assert CliRunner().invoke(app, ["parity", str(second.folder)]).exit_code == 0
    for given, told in (({"rank": 4}, "its own rank"), ({"base_dtype": "nf4"}, "base_dtype = 'float32'")):
        with pytest.raises(ValueError, match=told):
            train(model, tmp_path / "third", trainer={"lora": {"start": str(start)} | given})
    with pytest.raises(ValueError, match=r"lora\.start = .* with warmup\.accuracy = 0\.5: the warm-up changes the model"):
        train(model, tmp_path / "third", trainer={"lora": {"start": str(start)}}, warmup={"accuracy": 0.5})


def test_a_run_with_dropout_goes_on_to_the_bit_and_is_held_against_its_engines(model: Path, tmp_path: Path) -> None:
    def trained(name: str, steps: int, dropout: float | None = 0.4, **lora: Any) -> tidemill.Run:
        algorithm = {"name": "grpo", "zero_variance": "keep", "reference": {"kl": 0.1}, "old_logprobs": "recompute"}
        how: dict[str, Any] = {"trainer": {"lora": lora | {"dropout": dropout}, "lr": 1e-2}, "algorithm": algorithm}
        return train(model, tmp_path / name, steps=steps, **how)

    given: dict[str, Any] = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    whole, without = trained("whole", 4, **given), trained("without", 4, dropout=0.0, **given)
    trained("cut", 2, **given)
    runs = whole, trained("cut", 4, **given), without
    ours, theirs, plain = (load_file(run.folder / "final-adapter" / ADAPTER_WEIGHTS) for run in runs)
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], plain[name]) for name in ours), "it drops something"
    assert all(run.report["mismatch_lag0"]["max"] < 1e-4 for run in runs)
    said = CliRunner().invoke(app, ["parity", str(whole.folder)])
    assert said.exit_code == 0, said.output

    start = str(whole.folder / "final-adapter")
    second = trained("second", 1, dropout=None, start=start)
    assert AdapterConfig.from_folder(second.folder / "final-adapter").dropout == 0.4
    with pytest.raises(ValueError, match=r"dropout = 0\.4 with algorithm.old_logprobs = 'behaviour'"):
        train(model, tmp_path / "third", trainer={"lora": {"start": start}})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "base_dtype"),
    [("none", "float32"), ("zero2", "float32"), ("zero3", "float32"), ("none", "nf4"), ("zero3", "nf4")],
)
def test_ranks_save_an_adapter_that_one_rank_goes_on_with(model: Path, tmp_path: Path, shard: str, base_dtype: str) -> None:
    lora = {"rank": 3, "targets": ["q_proj", "down_proj"], "base_dtype": base_dtype}
    several = {
        "trainer": {"lora": lora, "lr": 1e-2, "ranks": 2, "shard": shard},
        "placement": "local",
        "deterministic": False,
    }
    first = train(model, tmp_path / "run", steps=2, **several)
    saved = read_tensors(first.folder / "checkpoints" / "step-000002" / "trainer")
    exported = load_file(first.folder / "final-adapter" / ADAPTER_WEIGHTS)
    assert len(saved) == 8 and all(torch.equal(saved[name.removeprefix(PREFIX)], exported[name]) for name in exported)
    base, final = dict(hf_views(load_served(model, base_dtype))), dict(hf_views(load_folder(first.final)))
    assert {name for name in base if not torch.equal(base[name], final[name])} <= {f"{n[:-14]}.weight" for n in saved}
    assert CliRunner().invoke(app, ["parity", str(first.folder)]).exit_code == 0

    alone = {"trainer": {"lora": lora, "lr": 1e-2}, "placement": "local", "deterministic": False}
    assert train(model, tmp_path / "run", steps=4, **alone).complete
    went_on = load_file(first.folder / "final-adapter" / ADAPTER_WEIGHTS)
    assert any(not torch.equal(went_on[name], exported[name]) for name in exported)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"targets": ["lm_head"]}, "name no matrix of this model's layers"),
        ({"targets": []}, "targets is empty"),
        ({"targets": "("}, "no regular expression"),
        ({"rank": 0}, "rank"),
        ({"dropout": 0.1}, "trainer.lora.dropout = 0.1 with algorithm.old_logprobs = 'behaviour'"),
        ({"dropout": 1.0}, "trainer.lora.dropout = 1.0"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(model: Path, tmp_path: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="") as refused:
        train(model, tmp_path / "run", trainer={"lora": given})
    assert sentence in str(refused.value)


def test_engines_of_a_reference_do_not_serve_a_quantised_base(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"base_dtype = 'nf4' with placement.reference_engines = 1: they would serve"):
        train(
            model,
            tmp_path / "run",
            trainer={"lora": {"base_dtype": "nf4"}},
            placement={"kind": "local", "reference_engines": 1},
            deterministic=False,
        )


def test_merge_asks_for_a_base_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(AdapterConfig(base="nowhere/at-all").to_json())
    said = CliRunner().invoke(app, ["merge", str(tmp_path), str(tmp_path / "out")])
    assert said.exit_code != 0 and not (tmp_path / "out").exists()
