"""Frozen policies by folder and by RUN/NAME@vN: which folder it is, what is refused, and what its version must prove."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from contradicting_tasks import random_adapter
from safetensors.torch import load_file, save_file

from tidemill.core.errors import ConfigError, UnsupportedModel
from tidemill.core.types import Version
from tidemill.ledger.ledger import SqliteLedger
from tidemill.models.adapter_config import ADAPTER_WEIGHTS
from tidemill.models.adapter_update import folder_fingerprint
from tidemill.models.hf_weights import load_folder
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.models.served_weights import Contents
from tidemill.run.frozen_folders import RecordedVersion, frozen_folder, frozen_version, known_model, recorded_version
from tidemill.run.recipe_files import absolute, same_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="ab\n", context=64, **SIZES["0.1m"])
    return folder


def a_run(place: Path, model: Path, policies: tuple[str, ...] = ("a", "b"), lora: dict[str, Any] | None = None) -> Path:
    """What a run of adapters leaves: a recipe, checkpoints of steps 4 and 8, the end at step 10, and its versions."""
    place.mkdir()
    recipe: dict[str, Any] = {"trainer": {"lora": {"rank": 2} if lora is None else lora}}
    recipe["policies"] = {name: {} for name in policies} | {"j": {"frozen": "elsewhere"}} if policies else {}
    (place / "config.json").write_text(json.dumps(recipe))
    groups = {"admitted": 1, "trained": 1, "dropped": {}, "pending": 0, "lost": 0}
    report = {"steps": 10, "wall_s": 1.0, "groups": groups, "accuracy_before": None, "accuracy_after": None}
    (place / "report.json").write_text(json.dumps(report | {"held_out": None}))
    with SqliteLedger(place) as ledger:
        for number, name in enumerate(policies or ("policy",)):
            ends = place / "final" / f"{name}-adapter" if policies else place / "final-adapter"
            for step, folder in (
                (4, place / "checkpoints" / "step-000004" / "trainer" / (name if policies else "")),
                (8, place / "checkpoints" / "step-000008" / "trainer" / (name if policies else "")),
                (10, ends),
            ):
                folder.parent.mkdir(parents=True, exist_ok=True)
                random_adapter(model, folder, seed=100 * number + step)
                ledger.publish(Version(step, policy=name, fingerprint=folder_fingerprint(folder)))
    return place


def test_a_version_is_found_in_checkpoints_and_at_the_end(model: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", model)
    for step, folder in ((4, run / "checkpoints/step-000004/trainer/b"), (10, run / "final/b-adapter")):
        given = f"{run}/b@v{step}"
        assert recorded_version(given) == RecordedVersion(run, "b", step) and str(recorded_version(given)) == given
        assert frozen_folder(given) == folder and not known_model(given)
        version = frozen_version("judge", given, "float32")
        assert version == Version(0, policy="judge", fingerprint=folder_fingerprint(folder))


def test_a_run_of_one_policy_calls_it_policy(model: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", model, ())
    assert frozen_folder(f"{run}/policy@v8") == run / "checkpoints/step-000008/trainer"
    assert frozen_folder(f"{run}/policy@v10") == run / "final-adapter"
    assert frozen_version("judge", f"{run}/policy@v10", "float32").policy == "judge"
    (run / "checkpoints/step-000008/trainer/adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="it holds v4, v10"):
        frozen_folder(f"{run}/policy@v8")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a@v5", "holds no such version of the policy 'a'; it holds v4, v8, v10"),
        ("c@v4", "has no policy 'c'; expected 'a' or 'b'"),
        ("j@v4", "has no policy 'j'; expected 'a' or 'b'"),
    ],
)
def test_what_a_run_does_not_hold_is_one_sentence(model: Path, tmp_path: Path, name: str, sentence: str) -> None:
    run = a_run(tmp_path / "run", model)
    with pytest.raises(ConfigError, match=sentence) as refused:
        frozen_folder(f"{run}/{name}")
    assert "\n" not in str(refused.value) and not known_model(f"{run}/{name}")


def test_a_run_that_published_whole_weights_has_no_adapter(model: Path, tmp_path: Path) -> None:
    for number, lora in enumerate(({}, {"rank": 2, "publish": "merged"})):
        run = a_run(tmp_path / f"run-{number}", model, (), lora)
        with pytest.raises(ConfigError, match="published whole weights, and a version of it is no adapter"):
            frozen_folder(f"{run}/policy@v4")
    with pytest.raises(ConfigError, match="is not readable as JSON"):
        frozen_folder(f"{tmp_path}/none/policy@v4")


def test_files_that_were_changed_are_not_what_the_run_published(model: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", model)
    file = run / "checkpoints/step-000004/trainer/a" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    first = min(tensors)
    save_file(tensors | {first: tensors[first] + 1}, file)
    with pytest.raises(ConfigError, match=r"a@v4: the folder holds the fingerprint \w+, and the run recorded a@v4"):
        frozen_version("judge", f"{run}/a@v4", "float32")
    swapped = run / "checkpoints/step-000008/trainer"
    os.rename(swapped / "a", swapped / "c")
    os.rename(swapped / "b", swapped / "a")
    with pytest.raises(ConfigError, match="its files were changed"):
        frozen_version("judge", f"{run}/a@v8", "float32")


def test_a_folder_may_have_a_name_like_a_version(model: Path, tmp_path: Path) -> None:
    folder = random_adapter(model, tmp_path / "judge@v3")
    assert recorded_version(str(folder)) is None and frozen_folder(str(folder)) == folder


def test_a_model_is_told_from_an_adapter(model: Path, tmp_path: Path) -> None:
    assert known_model(str(model)) and not known_model(str(random_adapter(model, tmp_path / "a")))
    assert not known_model(str(tmp_path / "none"))
    for dtype in ("float32", "bfloat16"):
        own = Contents.of(load_folder(model), getattr(torch, dtype)).fingerprint
        assert frozen_version("judge", str(model), dtype) == Version(0, policy="judge", fingerprint=own)
    with pytest.raises(UnsupportedModel, match="adapter_config"):
        frozen_version("judge", str(tmp_path), "float32")


def test_a_recorded_recipe_names_frozen_policies_by_whole_paths(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "run", model)
    random_adapter(model, tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    tree = {
        "policies": {"a": {"frozen": "run/a@v4"}, "b": {"frozen": "start"}, "c": {"frozen": "none"}},
        "trainer": {"kind": "native", "lora": {"start": "start"}},
    }
    found = absolute(tree)
    assert [each["frozen"] for each in found["policies"].values()] == [f"{tmp_path}/run/a@v4", f"{tmp_path}/start", "none"]
    assert found["trainer"] == {"kind": "native", "lora": {"start": f"{tmp_path}/start"}}
    assert same_file("policies.a.frozen", "run/a@v4", f"{tmp_path}/run/a@v4")
    assert same_file("trainer.lora.start", "start", f"{tmp_path}/start")
    assert not same_file("policies.a.frozen", "run/a@v4", f"{tmp_path}/run/a@v8")
