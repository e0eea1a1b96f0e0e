"""Models and data by their names on the hub, against one on this machine that speaks its interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hub_server
import huggingface_hub.constants as constants
import pytest

import tidemill
from tidemill.cli.commands.evaluate import find_subject
from tidemill.cli.commands.plan_sections import figures
from tidemill.cli.commands.run_state import model_of
from tidemill.cli.commands.serve import served_name
from tidemill.core.errors import ConfigError
from tidemill.core.hub import fetch, is_name, shown
from tidemill.envs.build_environment import make_environment
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.models.new_model import SIZES, fresh_model
from tidemill.run.hub_names import fetched
from tidemill.run.recipe import load_recipe

pytestmark = pytest.mark.runs

ROWS = [{"prompt": f"{c}{sign}", "answer": c} for c in "abcdefghij" for sign in "=:"]
FEW = {
    "placement": "inline",
    "rollout": {"groups": 2, "group_size": 4, "max_tokens": 2},
    "eval": {"tasks": 2, "final_tasks": 2},
}


def lines(rows: list[dict]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet="abcdefghij=:\n ", context=32, **SIZES["0.1m"])
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server.running() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        found.first = found.put_folder("model", "org/tiny", model)
        yield found


def recipe(**more):
    data = {"kind": "rows", "data": "org/sums", "reward": "exact"}
    return load_recipe([], [], {"run_dir": "run", "model": "org/tiny", "env": data, **more})


def test_a_name_is_what_has_its_form_and_is_nothing_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    names = ["org/name", "org/name@main", "o/n@refs/pr/3", "Qwen/Qwen3-0.6B"]
    others = [
        "name",
        "/org/name",
        "./org/name",
        "../name",
        "~/name",
        "a/b/c",
        "new:2m",
        "here/model",
        "here/absent",
        "a/b.jsonl",
    ]
    assert [is_name(each) for each in names + others] == [True] * len(names) + [False] * len(others)


def test_what_is_read_is_fetched_and_nothing_else(hub, model):
    files = {p.name: p.read_bytes() for p in model.iterdir()}
    extra = {
        "consolidated.safetensors": b"x",
        "pytorch_model.bin": b"x",
        "README.md": b"x",
        "original/model.safetensors": b"x",
    }
    commit = hub.put("model", "org/tiny", files | extra)
    folder = fetch("org/tiny", "model")
    assert {p.name for p in folder.iterdir()} == set(files) and folder.name == commit
    assert (shown(folder), shown(model)) == (f"org/tiny@{commit[:12]}", str(model))
    assert fetch("org/tiny@first", "model").name == hub.first
    bare = fetch("org/tiny", "model", weights=False)
    assert bare == folder  # of one commit there is one folder


def test_a_commit_that_is_known_needs_no_hub(hub, monkeypatch):
    folder = fetch("org/tiny", "model")
    hub.put("model", "org/tiny", {"config.json": b"{}"})
    hub.asked.clear()
    assert fetch("org/tiny", "model", hub.first) == folder and hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/tiny", "model") == folder  # as the cache has it


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "has none of that name that you may see: check the name; for a private one log in"),
        (
            "org/gated",
            "the hub wants you to be granted access to it: ask for that at http://127.0.0.1:.*/org/gated, and log in",
        ),
        ("org/tiny@nothing", "has no revision 'nothing' of org/tiny: give a branch, a tag or a commit"),
        ("org/broken", "http://127.0.0.1:[0-9]+ cannot be reached: check the name and the network|failed: .*500"),
        ("OFFLINE", "HF_HUB_OFFLINE is set and .*cache does not hold it whole: unset it, or give a folder"),
        ("UNREACHABLE", "http://127.0.0.1:9 cannot be reached: check the name and the network, or give a folder"),
    ],
)
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_cannot_be_had_is_one_sentence(kind, name, message, hub, monkeypatch):
    hub.put("dataset", "org/tiny", {"train.jsonl": lines(ROWS)})
    if name == "OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if name == "UNREACHABLE":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    given = "org/other" if name.isupper() else name
    with pytest.raises(ConfigError, match=message) as caught:
        fetch(given, kind)
    assert str(caught.value).startswith(f"{kind} {given!r} is no folder here, and ") and "\n" not in str(caught.value)


def test_a_folder_of_that_name_wins(hub, tmp_path, model):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(model)
    assert fetched(recipe(env="guess")).model == "org/tiny" and hub.asked == []


@pytest.mark.parametrize("package", [True, False], ids=["with datasets", "without"])
def test_data_by_its_name(hub, monkeypatch, tmp_path, package):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    if not package:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hub.put("dataset", "org/sums", {"train.jsonl": lines(ROWS), "weights.bin": b"x"})
    hub.put("dataset", "org/held-out", {"data/train.jsonl": lines([{"prompt": "z", "answer": "z"}])})
    data = {"kind": "rows", "data": "org/sums", "eval_data": "org/held-out@main", "reward": "exact"}
    found = fetched(recipe(env=data))
    environment = make_environment(found.env, RewardPool(workers=0))
    assert environment.name == "rows:sums"
    assert [len(environment.tasks(split)) for split in ("train", "eval")] == [20, 1]
    assert not any("weights.bin" in path for path in hub.asked)


def test_a_run_goes_on_with_the_files_it_began_with(hub, tmp_path, model):
    hub.put("dataset", "org/sums", {"train.jsonl": lines(ROWS)})
    env = {"kind": "rows", "data": "org/sums", "reward": "exact"}
    given = {"env": env, "model": "org/tiny", "run_dir": tmp_path / "run", "quiet": True, **FEW}
    assert tidemill.train(**given, steps=1).complete
    record = json.loads((tmp_path / "run" / "hub.json").read_text())
    assert record["model org/tiny"] == hub.first and set(record) == {"model org/tiny", "dataset org/sums"}
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["model"], config["env"]["data"]) == ("org/tiny", "org/sums")
    hub.put("model", "org/tiny", {"config.json": b"{}"})  # main has moved on, to what could not be trained
    hub.put("dataset", "org/sums", {"train.jsonl": lines([{"prompt": "other", "answer": "a"}] * 20)})
    hub.asked.clear()
    again = tidemill.train(**given, steps=2)
    assert again.complete and again.steps == 2 and hub.asked == []
    assert json.loads((tmp_path / "run" / "hub.json").read_text()) == record
    subject = find_subject(tmp_path / "run", None, 2, None, [])
    assert shown(subject.config.env.data) == f"org/sums@{record['dataset org/sums'][:12]}" and hub.asked == []


def test_a_refused_start_leaves_no_folder(hub, tmp_path):
    with pytest.raises(ConfigError, match="has none of that name"):
        tidemill.train(env="guess", model="org/absent", run_dir=tmp_path / "run", quiet=True, **FEW)
    assert not (tmp_path / "run").exists()


def test_commands_take_names(hub, model):
    folder = model_of(Path("org/tiny"))
    assert folder.name == hub.first and served_name(folder) == "org/tiny"
    assert find_subject(Path("org/tiny"), None, 2, None, ["env=guess"]).model == folder
    hub.put("model", "org/second", {p.name: p.read_bytes() for p in model.iterdir()})
    about = figures(fetched(recipe(model="org/second", env="guess"), data=False), complete=True)
    assert about["memory"]["model"].startswith("org/second@")
    assert not any(path.endswith("org/second/resolve/model.safetensors") or ("second" in path and "safetensors" in path)
                   for path in hub.asked)  # fmt: skip


def test_the_command_line_asks_the_endpoint_that_the_environment_names(hub, tmp_path):
    (tmp_path / "recipe.toml").write_text('model = "org/absent"\nenv = "guess"\n')
    given = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "tidemill", "train", "recipe.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=given, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "error: model 'org/absent' is no folder here, and"
    )
    assert any("org/absent" in path for path in hub.asked)
