"""Files that a recipe names are found in the current folder or beside the recipe, and from a run wherever one stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.config import dump
from tidemill.core.errors import ConfigError
from tidemill.envs.environment_settings import environments_of
from tidemill.run.recipe import load_recipe
from tidemill.run.recipe_files import absolute, check_same_run, same_file

ENVS = {
    "mytask.py:f": lambda env: env.path,
    '{ kind = "python", path = ["mytask.py:f", "sub/other.py:g"] }': lambda env: env.path[0],
    '{ kind = "rows", data = "rows.jsonl", reward = "exact" }': lambda env: f"{env.data}:f",
}


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch) -> Path:
    """A folder with files beside a recipe, and another one to stand in."""
    there = tmp_path / "there"
    (there / "sub").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for name in ("mytask.py", "sub/other.py", "rows.jsonl"):
        (there / name).write_text("")
    monkeypatch.chdir(tmp_path / "here")
    return there


def recipe(folder: Path, env: str) -> Path:
    (folder / "r.toml").write_text(f"model = 'm'\nenv = {env if env.startswith('{') else repr(env)}\n")
    return folder / "r.toml"


@pytest.mark.parametrize("env", ENVS)
def test_a_file_beside_the_recipe_is_found_from_any_folder(recipes: Path, monkeypatch, env: str):
    file = recipe(recipes, env)
    name = "rows.jsonl" if "rows" in env else "mytask.py"
    place = lambda config: ENVS[env](environments_of(config.env)[0]).rpartition(":")[0]  # noqa: E731
    elsewhere = load_recipe([file])
    assert place(elsewhere) == str(recipes / name)
    Path(name).write_text("")
    assert place(load_recipe([file])) == name, "the current folder comes first"
    monkeypatch.chdir(recipes)
    there = load_recipe([Path("r.toml")])
    assert place(there) == name
    recorded = absolute(dump(there))
    check_same_run(recorded, dump(elsewhere), Path("run"))  # the same run, wherever it is gone on with
    check_same_run(recorded, dump(there), Path("run"))
    with pytest.raises(ConfigError, match="holds a run of another recipe: env"):
        check_same_run(recorded, dump(load_recipe([recipe(recipes, env.replace(name, "new.py"))])), Path("run"))


def test_a_file_that_is_nowhere_is_told_with_the_folders(recipes: Path):
    with pytest.raises(ConfigError) as error:
        load_recipe([recipe(recipes, "none.py:f")])
    assert str(Path.cwd()) in str(error.value) and str(recipes) in str(error.value) and "'none.py'" in str(error.value)
    assert load_recipe([recipe(recipes, "~/none.py:f")]).env.path == "~/none.py:f"  # type: ignore[union-attr]
    assert load_recipe([recipe(recipes, "none.py:f")], ["env=guess"]).env.kind == "guess"  # type: ignore[union-attr]


@pytest.mark.parametrize("env", [f"{'x' * 5000}.py:f", f"{'a/' * 3000}t.py:f", "a\\u0000b.py:f"])
def test_a_name_that_no_file_can_have_is_one_sentence(recipes: Path, env: str):
    (recipes / "r.toml").write_text(f'model = "m"\nenv = "{env}"\n')
    with pytest.raises(ConfigError, match="does not exist in"):
        load_recipe([recipes / "r.toml"])
    assert absolute({"env": {"path": f"{'x' * 5000}.py:f"}})["env"]["path"].startswith("xxx")


@pytest.mark.parametrize(
    ("key", "old", "new", "same"),
    [
        ("env.path", "/a/b/t.py:f", "t.py:f", True),
        ("env.path", "./t.py:f", "/a/b/t.py:f", True),
        ("env.path", "/a/b/t.py:f", "t.py:g", False),
        ("env.path", "/a/bt.py:f", "t.py:f", False),
        ("env.path", ["/a/t.py:f", "/a/u.py:g"], ["t.py:f", "u.py:g"], True),
        ("env", [{"path": "/a/t.py:f", "weight": 1}], [{"path": "t.py:f", "weight": 2}], False),
        ("env.path", str(Path.cwd().parent / "t.py:f"), "../t.py:f", True),
        ("env.path", "/a/t.py:f", "../t.py:f", False),
        ("model", "/a/model", "model", False),
        ("env.command", "python /a/t.py --fast", "python t.py --fast", True),
        ("env.command", "python /a/t.py --fast", "python t.py --slow", False),
        ("env.command", "python /a/t.py", "python u.py", False),
        ("env.command", "/usr/bin/python t.py", "python t.py", False),
        ("env.command", "python t.py", "python 't.py", False),
        ("env.command", "python t.py x", "python t.py", False),
    ],
)
def test_which_differences_are_none(key: str, old, new, same: bool):
    assert same_file(key, old, new) == same == same_file(key, new, old)
