"""The demo's words where reasoning-gym is not installed, and that the demo takes them then."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.cli.commands import training
from tidemill.core.config import build
from tidemill.envs.build_environment import make_environment
from tidemill.envs.environment_settings import PythonSettings
from tidemill.envs.spelling import COUNT, LENGTHS, score, tasks, words
from tidemill.run.recipe import RunConfig


def test_words_are_different_ones_and_always_the_same():
    made = words(3000)
    assert len(set(made)) == 3000 and made == words(3000)
    lengths = [len(word) for word in made]
    assert set(lengths) == set(LENGTHS) and lengths.count(7) > lengths.count(6) > lengths.count(5) > lengths.count(4)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in made)


def test_right_answers_pass_and_held_out_words_are_others():
    train, held_out = ({row["prompt"]: row["answer"] for row in tasks(split)} for split in ("train", "eval"))
    assert len(train) + len(held_out) == COUNT and len(held_out) >= 1024 and not train.keys() & held_out.keys()
    for prompt, answer in held_out.items():
        word = prompt.rpartition(" ")[2]
        assert answer == word[::-1] and score(f" {answer}\n", answer) == 1.0
        assert score(f"{answer}x", answer) == 0.0 and (score(word, answer) == 1.0) == (word == answer)


@pytest.mark.parametrize("installed", [True, False])
def test_the_demo_takes_them_where_there_is_no_reasoning_gym(monkeypatch, capsys, installed: bool):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(
        training, "by_recipe", lambda recipe, overrides, as_json: asked.update(recipe=recipe, given=overrides) or 0
    )
    assert training.demo(["steps=3"], False) == 0
    config = training.load_recipe([asked["recipe"]], asked["given"])
    assert config.steps == 3 and config.env.kind == ("reasoning_gym" if installed else "python")
    assert ("pip install 'tidemill[gym]'" in capsys.readouterr().out) != installed


def test_the_environment_is_called_by_its_module():
    env = build(
        RunConfig, {"model": "m", "run_dir": "r", "env": {"kind": "python", "path": "tidemill.envs.spelling:score"}}
    ).env
    assert isinstance(env, PythonSettings)
    scorer: Any = None
    made = make_environment(env, scorer)
    assert made.name == "spelling" and len(made.tasks("eval")) >= 1024
