"""Whole runs of two policies: gone on with after a stop, over each transport, and read by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contradicting_tasks import ALPHABET, PLAYED, POLICIES, check_record, environments, random_adapter
from safetensors.torch import load_file
from typer.testing import CliRunner

import tidemill
from tidemill.cli.main import app
from tidemill.core.errors import ConfigError
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import ADAPTER_WEIGHTS
from tidemill.models.hf_weights import hf_views, load_folder
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet=ALPHABET, context=64, **SIZES["0.1m"])
    return folder


def train(model: Path, place: Path, steps: int = STEPS, judge: Path | str | None = None, **more: Any) -> tidemill.Run:
    place.mkdir(exist_ok=True)
    how: dict[str, Any] = {
        "policies": POLICIES if judge is None else POLICIES | {"judge": {"frozen": str(judge)}},
        "trainer": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "lr": 1e-2},
        "rollout": {"groups": 4, "group_size": 4, "max_tokens": 2},
        "algorithm": {"name": "grpo", "zero_variance": "keep", "reference": {"kl": 0.01}},
        "eval": {"every": 3, "tasks": 8, "final_tasks": 8},
        "record": {"checkpoint_every": 2, "trace": False, "probe_every": 1},
        "placement": {"kind": "inline", "environment": {"workers": 0}},
        "max_lag": 1,
    }
    env = environments(place, judged=judge is not None)
    return tidemill.train(env, model, run_dir=place / "run", quiet=True, steps=steps, **how | more)


def adapter(run: tidemill.Run, policy: str) -> dict[str, torch.Tensor]:
    return load_file(run.final / f"{policy}-adapter" / ADAPTER_WEIGHTS)


def test_a_run_goes_on_with_all_its_policies_and_commands_read_each(model: Path, tmp_path: Path) -> None:
    judge = random_adapter(model, tmp_path / "judge")
    place = tmp_path / "place"
    cut = train(model, place, 3, judge)
    saved = {policy: adapter(cut, policy) for policy in POLICIES}
    for policy in POLICIES:  # the checkpoint of its last step holds what it exported, and so does the model
        kept = load_file(cut.folder / "checkpoints" / "step-000003" / "trainer" / policy / ADAPTER_WEIGHTS)
        assert kept.keys() == saved[policy].keys() and all(torch.equal(kept[n], saved[policy][n]) for n in kept)
    run = train(model, place, STEPS, judge)
    assert run.complete and run.report["mismatch_lag0"]["max"] < 1e-4 and run.report["policies"] == [*POLICIES]
    check_record(run.folder, STEPS, frozen={"judge": judge})
    base = dict(hf_views(load_folder(model)))
    for policy in POLICIES:
        went_on, final = adapter(run, policy), dict(hf_views(load_folder(run.final / policy)))
        assert any(not torch.equal(went_on[name], saved[policy][name]) for name in went_on)
        moved = {name for name in base if not torch.equal(base[name], final[name])}
        assert moved and all("q_proj" in name or "down_proj" in name for name in moved)
    assert all(f"model: {run.final / policy} (Hugging Face)" in repr(run) for policy in POLICIES)

    said = CliRunner().invoke(app, ["parity", str(run.folder), "--json"])
    assert said.exit_code == 0, said.output
    replayed = json.loads(said.output)["replay"]
    assert replayed["ok"] and not replayed["strangers"]
    assert {each["version"].partition("@")[0] for each in replayed["versions"]} == {*POLICIES}
    said = CliRunner().invoke(app, ["eval", str(run.folder), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.output)
    with SqliteLedger(run.folder, mode="read") as ledger:
        last = ledger.evaluations()[-1]
    assert found["accuracy"] == last.accuracy and {f"{env}/accuracy" for env in PLAYED} <= found.keys()
    assert all(found[f"{env}/accuracy"] == last.metrics[f"{env}/accuracy"] for env in PLAYED)
    said = CliRunner().invoke(app, ["eval", str(run.folder), "--which", "initial"])
    assert "--which initial is the model alone" in str(said.exception) and "other weights of judge" in str(said.exception)
    said = CliRunner().invoke(app, ["serve", str(run.folder)])
    assert "trained 2 policies: give the model of one" in str(said.exception)
    for command in ("ledger", "samples", "why"):
        said = CliRunner().invoke(app, [command, str(run.folder)])
        assert said.exit_code == 0, said.output

    recorded = f"{run.folder}/follow@v4"
    later = train(model, tmp_path / "later", 2, recorded)
    assert later.complete
    check_record(later.folder, 2, frozen={"judge": recorded})
    with SqliteLedger(later.folder, mode="read") as own, SqliteLedger(run.folder, mode="read") as earlier:
        (asked,) = {each.fingerprint for each in own.versions() if each.policy == "judge"}
        assert asked in {each.fingerprint for each in earlier.versions() if (each.policy, each.step) == ("follow", 4)}
    with pytest.raises(ConfigError, match="holds no such version of the policy 'follow'; it holds v4, v6"):
        train(model, tmp_path / "none", 2, f"{run.folder}/follow@v5")


def test_a_frozen_policy_stays_what_it_was(model: Path, tmp_path: Path) -> None:
    judge, place = random_adapter(model, tmp_path / "judge"), tmp_path / "place"
    train(model, place, 2, judge)
    random_adapter(model, tmp_path / "judge", seed=8)
    with pytest.raises(
        ConfigError, match=r"policies.judge.frozen = .* holds judge@v0 .*, and the run was begun with judge@v0"
    ):
        train(model, place, 4, judge)


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "collective", "direct"])
def test_each_transport_carries_every_policy(model: Path, tmp_path: Path, transport: str) -> None:
    placement = {"kind": "local", "engines": 2, "sync": {"transport": transport}, "environment": {"workers": 0}}
    run = train(model, tmp_path / "place", placement=placement)
    assert run.complete and run.report["mismatch_lag0"]["max"] < 1e-4 and run.report["mismatch_lag0"]["tokens"] > 0
    check_record(run.folder, STEPS)


def test_a_run_without_frozen_policies_is_evaluated_as_it_began(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "place", 2)
    with SqliteLedger(run.folder, mode="read") as ledger:
        first = ledger.evaluations()[0]
    said = CliRunner().invoke(app, ["eval", str(run.folder), "--which", "initial", "--json"])
    assert said.exit_code == 0 and json.loads(said.output)["accuracy"] == first.accuracy, said.output


WHOLE: dict[str, Any] = {"trainer": {"lr": 1e-3}}


def test_whole_models_are_trained_beside_one_that_is_frozen(model: Path, tmp_path: Path) -> None:
    judge, place = tmp_path / "judge", tmp_path / "place"
    fresh_model(judge, alphabet=ALPHABET, context=64, seed=9, **SIZES["0.1m"])
    cut = train(model, place, 3, judge, **WHOLE)
    saved = {policy: dict(hf_views(load_folder(cut.final / policy))) for policy in POLICIES}
    run = train(model, place, STEPS, judge, **WHOLE)
    assert run.complete and run.report["mismatch_lag0"]["max"] < 1e-4 and run.report["policies"] == [*POLICIES]
    assert run.report["mismatch_lag0"]["tokens"] > 0
    check_record(run.folder, STEPS, frozen={"judge": judge})
    base = dict(hf_views(load_folder(model)))
    for policy in POLICIES:
        final = dict(hf_views(load_folder(run.final / policy)))
        for before in (base, saved[policy]):
            assert any(not torch.equal(before[name], final[name]) for name in final), "it did not go on"
        assert not (run.final / f"{policy}-adapter").exists()
    said = CliRunner().invoke(app, ["parity", str(run.folder), "--json"])
    assert said.exit_code == 0, said.output
    replayed = json.loads(said.output)["replay"]
    assert replayed["ok"] and not replayed["strangers"]
    assert {each["version"].partition("@")[0] for each in replayed["versions"]} == {*POLICIES}
    said = CliRunner().invoke(app, ["eval", str(run.folder), "--json"])
    assert said.exit_code == 0, said.output
    with SqliteLedger(run.folder, mode="read") as ledger:
        last = ledger.evaluations()[-1]
    found = json.loads(said.output)
    assert found["accuracy"] == last.accuracy
    assert all(found[f"{env}/accuracy"] == last.metrics[f"{env}/accuracy"] for env in PLAYED)

    fresh_model(judge, alphabet=ALPHABET, context=64, seed=10, **SIZES["0.1m"])
    with pytest.raises(ConfigError, match=r"holds judge@v0 .*, and the run was begun with judge@v0 .*: put the folder back"):
        train(model, place, STEPS + 1, judge, **WHOLE)


def test_a_model_judges_policies_that_are_adapters(model: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    fresh_model(judge, alphabet=ALPHABET, context=64, seed=9, **SIZES["0.1m"])
    run = train(model, tmp_path / "place", judge=judge)
    assert run.complete
    check_record(run.folder, STEPS, frozen={"judge": judge})
    said = CliRunner().invoke(app, ["eval", str(run.folder), "--json"])
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "collective", "direct"])
def test_each_transport_carries_every_whole_model(model: Path, tmp_path: Path, transport: str) -> None:
    placement = {"kind": "local", "sync": {"transport": transport}, "environment": {"workers": 0}}
    run = train(model, tmp_path / "place", placement=placement, **WHOLE)
    assert run.complete and run.report["mismatch_lag0"]["max"] < 1e-4 and run.report["mismatch_lag0"]["tokens"] > 0
    check_record(run.folder, STEPS)


def test_policies_of_their_own_rank_algorithm_and_rate_on_a_base_in_few_bits(model: Path, tmp_path: Path) -> None:
    twice = {"name": "grpo", "old_logprobs": "recompute", "updates": {"minibatches": 2}, "zero_variance": "keep"}
    lora = {"rank": 2, "targets": ["o_proj"], "base_dtype": "nf4"}
    policies = {"echo": {"lr": 1e-3, "lora": lora, "algorithm": twice}, "follow": {}}
    trainer = {"lora": {"rank": 4, "base_dtype": "nf4"}, "lr": 1e-2}
    run = train(model, tmp_path / "place", policies=policies, trainer=trainer)
    assert run.complete and run.report["mismatch_lag0"]["max"] < 1e-4
    check_record(run.folder, STEPS)
    assert {name.split(".")[-3] for name in adapter(run, "echo")} == {"o_proj"}
    assert CliRunner().invoke(app, ["parity", str(run.folder)]).exit_code == 0


@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "whole models"])
def test_the_warm_up_makes_the_model_that_all_policies_begin_with(model: Path, tmp_path: Path, whole: bool) -> None:
    files = {"data": tmp_path / "rows.jsonl", "eval_data": tmp_path / "held_out.jsonl"}
    for file, sign in zip(files.values(), "=:", strict=True):
        file.write_text("".join(json.dumps({"prompt": f"{c}{sign}", "answer": c}) + "\n" for c in "abcd"))
    rows = {"kind": "rows", "reward": "exact", **{key: str(file) for key, file in files.items()}}
    env = [{**rows, "name": name, "policy": policy} for name, policy in PLAYED.items()]
    trainer: dict[str, Any] = {} if whole else {"lora": {"rank": 4}}
    how = {"policies": POLICIES, "trainer": trainer, "warmup": {"accuracy": 0.5, "batch": 8}}
    rollout = {"groups": 4, "group_size": 4, "max_tokens": 2}
    run = tidemill.train(
        env,
        model,
        run_dir=tmp_path / "run",
        quiet=True,
        steps=2,
        rollout=rollout,
        algorithm={"name": "grpo", "zero_variance": "keep"},
        placement={"kind": "inline"},
        eval={"every": 0, "tasks": 4, "final_tasks": 4},
        record={"trace": False},
        **how,
    )
    assert run.complete and run.report["warmup_s"] > 0
    check_record(run.folder, 2)
    begun, initial = (dict(hf_views(load_folder(each))) for each in (model, run.folder / "initial"))
    assert any(not torch.equal(begun[name], initial[name]) for name in begun), "the warm-up trains the model itself"
    with SqliteLedger(run.folder, mode="read") as ledger:
        greedy = [version for version in ledger.versions() if version.step == 0]
    assert {version.policy for version in greedy} == {*POLICIES}, "the warm-up's own versions are no part of the record"
