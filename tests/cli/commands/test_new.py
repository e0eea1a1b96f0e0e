"""`tidemill new`: what it writes works as it is, and its test of the reward can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tidemill.cli.commands.new import check_name
from tidemill.core.errors import ConfigError
from tidemill.run.recipe import load_recipe

pytestmark = pytest.mark.runs


@pytest.fixture
def task(tidemill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading an environment puts its folder there
    said = tidemill("new", "digits")
    assert said.code == 0 and "tidemill train recipe.toml" in said.out and "cd digits" in said.out
    return tmp_path / "digits"


def keys(tree: dict) -> int:
    return sum(keys(v) if isinstance(v, dict) else 1 for v in tree.values())


def own_test(task: Path) -> subprocess.CompletedProcess[str]:
    args = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(task), str(task)]
    return subprocess.run(args, cwd=task, capture_output=True, text=True, timeout=60)


def test_the_recipe_parses_and_is_short(task: Path):
    assert sorted(p.name for p in task.iterdir()) == ["digits.py", "recipe.toml", "test_digits.py"]
    assert keys(tomllib.loads((task / "recipe.toml").read_text())) <= 12
    config = load_recipe([task / "recipe.toml"])
    assert config.env.path == f"{task / 'digits.py'}:score" and config.max_lag >= 1 and config.model == "new:0.1m"
    assert len((task / "digits.py").read_text().splitlines()) <= 25


def test_its_own_test_passes_and_notices_a_broken_reward(task: Path):
    good = own_test(task)
    assert good.returncode == 0 and "4 passed" in good.stdout, good.stdout
    source = (task / "digits.py").read_text()
    returned = next(line for line in source.splitlines() if line.startswith("    return sum"))
    for broken in ("    return 1.0", returned.replace("max(", "min(").replace("len(reply), ", "9, ")):
        (task / "digits.py").write_text(source.replace(returned, broken))
        assert own_test(task).returncode == 1, broken


def test_it_trains_at_once(task: Path, tidemill, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(task)
    few = [
        "steps=2",
        "warmup.accuracy=0",
        "rollout.groups=2",
        "rollout.group_size=2",
        "eval.final_tasks=4",
        "scoring.workers=1",
    ]
    said = tidemill("train", "recipe.toml", "placement=inline", *few, "--json")
    report = json.loads(said.out.splitlines()[-1])
    assert said.code == 0 and report["steps"] == 2 and report["held_out"] == 4
    assert report["groups"]["trained"] == report["groups"]["admitted"] == 4
    assert json.loads(tidemill("samples", "runs/digits", "--best", 1, "--json").out)[0]["task"]["prompt"].startswith("sort ")


def test_nothing_is_overwritten(task: Path, tidemill):
    (task / "digits.py").write_text("mine")
    said = tidemill("new", "digits")
    assert said.code == 2 and "exists already" in said.out and (task / "digits.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-task", "such as 'my_task'"),
        ("2fast", "letters, digits and underscores"),
        ("a/b", "such as 'a_b'"),
        ("", "letters, digits and underscores"),
        ("class", "a word of Python"),
        ("json", "would hide it"),
        ("torch", "would hide it"),
        ("tidemill", "would hide it"),
    ],
)
def test_names_that_would_not_work(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_name(name)
