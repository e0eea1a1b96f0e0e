"""`tidemill new NAME`: makes a folder with a task, a recipe and tests to start from."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from tidemill.core.errors import ConfigError

ENVIRONMENT = '''\
"""The task: write the digits of a number in ascending order. Change `score` and `tasks`, and it is yours."""

from random import Random


def score(completion: str, answer: str) -> float:
    """The reward of one reply, from 0 to 1: the share of the digits that are in their place."""
    reply = completion.strip()
    return sum(a == b for a, b in zip(reply, answer)) / max(len(reply), len(answer))


def row(digits: str) -> dict[str, str]:
    """A task: its prompt, and every column that `score` asks for by name."""
    return {"prompt": f"sort {digits}", "answer": "".join(sorted(digits))}


draw = Random(0)
tasks = [row("".join(draw.choices("0123456789", k=draw.randint(3, 6)))) for _ in range(6000)]  # a tenth is held out
'''

RECIPE = """\
# Train with `tidemill train recipe.toml` in this folder. Any key can be given there too, as in `steps=200`.
run_dir = "runs/{name}"
model = "new:0.1m"            # a random model made here; or the path of a Hugging Face folder, without the warm-up
env = "{name}.py:score"
algorithm = "grpo"
steps = 100
max_lag = 1                   # how many versions old what is trained on may be
rollout.max_tokens = 8
trainer.lr = 3e-4
warmup.accuracy = 0.6         # supervised until then: who solves nothing earns nothing to learn from
warmup.lr = 2e-3
eval.final_tasks = 512
"""

TEST = '''\
"""The reward, before any model sees it: right answers score 1, wrong ones less, garbage nothing."""

from {name} import score, tasks


def test_every_answer_scores_one():
    assert all(score(task["answer"], task["answer"]) == 1.0 for task in tasks)


def test_wrong_answers_score_less():
    assert 0.0 < score("124", "123") < 1.0
    assert score("1233", "123") < 1.0  # nothing is earned by writing on


def test_garbage_scores_nothing():
    assert score("", "123") == score("no idea", "123") == 0.0


def test_no_task_comes_twice_with_another_answer():
    assert len({{task["prompt"] for task in tasks}}) == len({{(task["prompt"], task["answer"]) for task in tasks}})
'''


def new(name: str) -> int:
    """Make the folder NAME. Returns 0. Raises ConfigError if it exists."""
    check_name(name)
    folder = Path(name)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already, and nothing is overwritten: choose another name, or remove it")
    contents = files(name)
    folder.mkdir()
    for file, text in contents.items():
        (folder / file).write_text(text)
    width = max(map(len, contents))
    what = ("the task and its reward: make it yours", "how it is trained", "tests of the reward, before any model sees it")
    for file, says in zip(contents, what, strict=True):
        print(f"  {name}/{file:<{width}}  {says}")
    pytest = "python -m pytest" if importlib.util.find_spec("pytest") else "pip install pytest && python -m pytest"
    print(f"\n  next:  cd {name}\n         {pytest}\n         tidemill train recipe.toml")
    print(f"         tidemill samples runs/{name} --worst 3 --tokens")
    return 0


def files(name: str) -> dict[str, str]:
    return {
        f"{name}.py": ENVIRONMENT,
        "recipe.toml": RECIPE.format(name=name),
        f"test_{name}.py": TEST.format(name=name),
    }


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can be a module's, and hides no other module."""
    if not (name.isidentifier() and name.isascii()):
        plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name).strip("_")
        hint = f", such as {plain!r}" if plain.isidentifier() else ""
        raise ConfigError(f"name {name!r}: expected letters, digits and underscores, for it names a Python file too{hint}")
    if keyword.iskeyword(name):
        raise ConfigError(f"name {name!r} is a word of Python, and no module can be called that; choose another name")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"name {name!r}: a Python module is called that, and {name}.py would hide it; choose another name")
