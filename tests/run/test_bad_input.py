"""What a user gets wrong: one sentence of what was given, what was expected, what to do; a non-zero exit; no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tidemill.cli import main
from tidemill.envs.guess import ALPHABET
from tidemill.models.new_model import SIZES, fresh_model

pytestmark = pytest.mark.runs

REWARDS = """
import time

def raises(completion, answer):
    raise ZeroDivisionError("boom")

def nan(completion, answer):
    return float("nan")

def never(completion, answer):
    time.sleep(3600)

def needs(completion, solution):
    return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    fresh_model(folder, alphabet=ALPHABET + "=", context=48, **SIZES["0.1m"])
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(40)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return path


def fails(monkeypatch, capsys, *arguments: str) -> str:
    """Run the command line; it must fail with status 2 and one line on stderr, which is returned."""
    monkeypatch.setattr(sys, "argv", ["tidemill", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def train(monkeypatch, capsys, tmp_path: Path, **settings: str) -> str:
    return refused(monkeypatch, capsys, tmp_path, "train", **settings)


def refused(monkeypatch, capsys, tmp_path: Path, command: str, **settings: str) -> str:
    recipe = tmp_path / "recipe.toml"
    base = {"run_dir": f'"{tmp_path / "run"}"', "env": '"guess"', "steps": "3", "placement": '"inline"'}
    base |= {"eval": "{ tasks = 2, final_tasks = 2 }", "rollout": "{ groups = 2, group_size = 2, max_tokens = 2 }"}
    recipe.write_text("".join(f"{key} = {value}\n" for key, value in {**base, **settings}.items()))
    return fails(monkeypatch, capsys, command, str(recipe))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stepz": "3"}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"steps": '"many"'}, "steps = 'many'"),
        ({"env": '"gess"'}, "unknown environment 'gess' (did you mean 'guess'?)"),
        ({"env": '"reasoning_gym:spel_backward"'}, "spell_backward"),
        ({"env": "{ kind = 'guess', low = 5, high = 2 }"}, "expected low < high"),
        ({"rollout": "{ group_size = 1 }"}, "group size 1 with advantage 'grpo'"),
        ({"model": '"nowhere"'}, "model 'nowhere' is not a folder"),
        ({"model": '"new:7b"'}, "expected new:0.1m, new:2m"),
        ({"engine": "{ context = 4 }"}, "the context holds 4"),
    ],
)
def test_settings(settings, sentence, monkeypatch, capsys, tmp_path, model):
    assert sentence in train(monkeypatch, capsys, tmp_path, **{"model": f'"{model}"', **settings})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("placement", ['"inline"', pytest.param('"local"', marks=pytest.mark.slow)])
def test_a_start_that_is_refused_leaves_no_folder_unless_it_was_there(placement, monkeypatch, capsys, tmp_path):
    """Also where it came as far as to make a model."""
    settings = {"model": '"new:0.1m"', "engine": "{ context = 4 }", "placement": placement}
    before = {*tmp_path.iterdir(), tmp_path / "recipe.toml"}
    assert "the context holds 4" in train(monkeypatch, capsys, tmp_path, **settings)
    assert {*tmp_path.iterdir()} == before
    (tmp_path / "run").mkdir()
    assert "the context holds 4" in train(monkeypatch, capsys, tmp_path, **settings)
    assert (tmp_path / "run" / "config.json").exists() and (tmp_path / "run" / "failure.json").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"run_dir": '"/proc/x/y"'}, "run_dir /proc/x/y cannot be written: "),
        ({"run_dir": '"{place}/recipe.toml/run"'}, "recipe.toml/run cannot be written: "),
        ({"trainer": "{ device = 'cuda' }"}, "trainer on 'cuda': no such device is visible here"),
        ({"model": '"{place}/empty"'}, "config.json"),
    ],
)
def test_what_this_machine_lacks_is_the_users_to_mend(settings, sentence, monkeypatch, capsys, tmp_path, model):
    if "cuda" in sentence and torch.cuda.is_available():
        pytest.skip("it is here")
    (tmp_path / "empty").mkdir()
    given = {"model": f'"{model}"', **{key: value.replace("{place}", str(tmp_path)) for key, value in settings.items()}}
    assert sentence in train(monkeypatch, capsys, tmp_path, **given)


def copied(model: Path, to: Path, name: str, **changes: object) -> Path:
    """The model with some keys of one of its JSON files changed; None removes a key."""
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    data = json.loads((to / name).read_text())
    data.update(changes)
    (to / name).write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return to


@pytest.mark.parametrize(
    ("alphabet", "differs"),
    [
        (ALPHABET, "has a vocabulary of {fewer} tokens and the policy {policy!r} one of {count}:"),
        ("=" + ALPHABET, "differ in {count_but_three} of their tokens (id 3 is '=' there and {first!r} here):"),
        (None, "is not a folder: give the path of a Hugging Face model, or 'initial'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize(("preset", "key"), [("opd", "reference"), ("ppo", "critic")])
def test_a_teacher_or_critic_of_another_language(
    preset, key, command, alphabet, differs, monkeypatch, capsys, tmp_path, model
):
    """Named by both models and what differs, before an engine or a trainer starts or a weight is read."""
    teacher, count = tmp_path / "teacher", len(ALPHABET) + 4
    if alphabet is not None:
        fresh_model(teacher, alphabet=alphabet, context=48, **SIZES["0.1m"])
        (teacher / "model.safetensors").unlink()
    elif command == "explain":
        pytest.skip("a recipe may be explained where its models are not")
    monkeypatch.setattr("tidemill.run.session.Session.start", None)
    recipe = {"model": f'"{model}"', "algorithm": f'{{ name = "{preset}", {key} = "{teacher}" }}'}
    error = refused(monkeypatch, capsys, tmp_path, command, **recipe)
    known = {"fewer": count - 1, "count": count, "count_but_three": count - 3, "policy": str(model), "first": ALPHABET[0]}
    assert f"algorithm.{key}.model = {str(teacher)!r} " in error and differs.format(**known) in error


def test_an_unsupported_architecture_is_refused_by_name(monkeypatch, capsys, tmp_path, model):
    folder = copied(model, tmp_path / "m", "config.json", model_type="gpt2")
    monkeypatch.setattr("tidemill.run.session.preparing", None)  # at once: that needs no torch
    assert "model_type 'gpt2' is not one of" in train(monkeypatch, capsys, tmp_path, model=f'"{folder}"')


def test_a_tokenizer_without_an_end(monkeypatch, capsys, tmp_path, model):
    folder = copied(model, tmp_path / "m", "tokenizer_config.json", eos_token=None)
    assert "no eos_token" in train(monkeypatch, capsys, tmp_path, model=f'"{folder}"')


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("tokenizer.json", None, "no tokenizer there; expected a folder with one of tokenizer.json, "),
        pytest.param(
            *("tokenizer.json", '{"version": "1.0", "mod', "its tokenizer cannot be loaded ("), marks=pytest.mark.slow
        ),
        pytest.param(
            "tokenizer_config.json",
            '{"tokenizer_class": "PreTrainedTokenizerFast"}',
            "its tokenizer has no eos_token; name one in tokenizer_config.json",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_tokenizer_is_told_of_alike_wherever_it_is_looked_at(
    file, text, sentence, monkeypatch, capsys, tmp_path, model
):
    folder = copied(model, tmp_path / "m", "config.json")
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    here, elsewhere = (
        train(monkeypatch, capsys, tmp_path, model=f'"{folder}"', placement=f'"{kind}"') for kind in ("inline", "local")
    )
    assert here == elsewhere and here.startswith(f"error: {folder}: {sentence}")


def test_a_folder_without_weights(monkeypatch, capsys, tmp_path, model):
    folder = copied(model, tmp_path / "m", "config.json")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in train(monkeypatch, capsys, tmp_path, model=f'"{folder}"')


def test_an_empty_dataset_and_a_missing_file(monkeypatch, capsys, tmp_path, model):
    (tmp_path / "empty.jsonl").write_text("")
    for name, sentence in (("empty.jsonl", "is empty"), ("none.jsonl", "does not exist")):
        env = f'{{ kind = "rows", data = "{tmp_path / name}", reward = "exact" }}'
        assert sentence in train(monkeypatch, capsys, tmp_path, model=f'"{model}"', env=env)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("raises", "ZeroDivisionError: boom"),
        ("nan", "nan"),
        ("never", "did not return within 0.3 s"),
        ("needs", "'solution', which no task has"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_a_reward_that_cannot_judge_stops_the_run(reward, sentence, monkeypatch, capsys, tmp_path, model, rows):
    env = f'{{ kind = "rows", data = "{rows}", reward = "{tmp_path / "rewards.py"}:{reward}" }}'
    scoring = "{ workers = 2, limit_s = 0.3 }"
    error = train(monkeypatch, capsys, tmp_path, model=f'"{model}"', env=env, scoring=scoring)
    assert sentence in error
    if (tmp_path / "run" / "ledger.sqlite").exists():  # nothing is lost, and nothing was trained on a failure
        monkeypatch.setattr(sys, "argv", ["tidemill", "ledger", str(tmp_path / "run"), "--json"])
        with pytest.raises(SystemExit) as ended:
            main.main()
        counts = json.loads(capsys.readouterr().out)
        assert ended.value.code == 0 and counts["trained"] == 0 and counts["lost"] == 0


def test_a_recipe_that_is_not_there(monkeypatch, capsys, tmp_path):
    assert "does not exist" in fails(monkeypatch, capsys, "train", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30)], ids=["a name", "a path"])
def test_paths_that_are_longer_than_the_system_takes_are_one_sentence(name, monkeypatch, capsys, tmp_path, model):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{model}"\nenv = "guess"\n')
    for given in (
        ["why", name],
        ["samples", name],
        ["ledger", name],
        ["serve", name],
        ["new", name],
        ["check", name],
        ["check", str(recipe), f"model={name}"],
        ["train", str(recipe), f"run_dir={tmp_path / name}"],
        ["train", str(recipe), f"run_dir={tmp_path / 'run'}", f"env={{kind='python', path='{name}.py:f'}}"],
    ):
        monkeypatch.setattr(sys, "argv", ["tidemill", *given])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr().err
        assert ended.value.code in (1, 2) and said.startswith("error: ") and said.count("\n") == 1, (given[0], said[:300])
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else(monkeypatch, capsys, tmp_path, model):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert "holds no run" in train(monkeypatch, capsys, tmp_path, model=f'"{model}"')
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"


def test_a_start_that_failed_binds_nothing_and_fewer_steps_than_begun_are_refused(monkeypatch, capsys, tmp_path, model):
    broken = {"model": f'"{model}"', "trainer": '{ device = "cuda:7" }', "env": '{ kind = "guess", turns = 2 }'}
    train(monkeypatch, capsys, tmp_path, **broken)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('{ device = "cuda:7" }', '{ device = "cpu" }'))
    monkeypatch.setattr(sys, "argv", ["tidemill", "train", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0, capsys.readouterr().err
    (tmp_path / "run" / "report.json").unlink()  # as if it had been interrupted
    assert "has begun step 3 already" in fails(monkeypatch, capsys, "train", str(recipe), "steps=2")


@pytest.mark.parametrize("change", ["a row more", "another answer"])
def test_a_run_does_not_go_on_with_other_tasks(change, monkeypatch, capsys, tmp_path, model, rows):
    recipe, judge = tmp_path / "recipe.toml", tmp_path / "judge.py"
    judge.write_text("def length(completion, answer):\n    return len(completion) / 2\n")
    settings = {"run_dir": f'"{tmp_path / "run"}"', "model": f'"{model}"', "steps": "2", "placement": '"inline"'}
    settings["env"] = f'{{ kind = "rows", data = "{rows}", reward = "{judge}:length" }}'
    settings |= {"eval": "{ tasks = 2, final_tasks = 2 }", "rollout": "{ groups = 2, group_size = 2, max_tokens = 2 }"}
    settings["scoring.accept"] = '["gold", "garbage"]'
    recipe.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))

    def command(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["tidemill", "train", str(recipe), *more])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 0, capsys.readouterr().err

    command()
    before = rows.read_text()
    more = json.dumps({"prompt": "say 99", "answer": "99"}) + "\n"
    rows.write_text(before + more if change == "a row more" else before.replace('"answer": "', '"answer": "1'))
    error = fails(monkeypatch, capsys, "train", str(recipe), "steps=3")
    assert "the tasks are not those that" in error and "put the data back" in error
    rows.write_text(before)
    command("steps=3")
